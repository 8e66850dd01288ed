"""What `dualtune launch` refuses, before anything is started: by name, with what is allowed."""

import pytest

LOCAL, MLX, SLURM = ("--on", "local"), ("--on", "mlx"), ("--on", "slurm", "--procs", "1")
SEVERAL = ("--nodes", "2", "--node-rank", "0", "--rendezvous", "a:1")
FORBIDDEN = [
    ((*LOCAL, "--hosts", "10.0.0.1"), "--hosts is for --on mlx, not for --on local"),
    ((*LOCAL, "--hostfile", "h.json"), "--hostfile is for --on mlx"),
    ((*LOCAL, "--gpus-per-node", "1"), "--gpus-per-node is for --on slurm"),
    ((*LOCAL, "--grace", "120"), "--grace is for --on slurm"),  # also with its default value
    ((*LOCAL, "--sbatch-option", "qos=a"), "--sbatch-option is for --on slurm"),
    ((*MLX, "--nodes", "2"), "--nodes is for --on local and slurm, not for --on mlx"),
    ((*MLX, "--rendezvous", "a:1"), "--rendezvous is for --on local"),
    ((*MLX, "--array", "0-1"), "--array is for --on slurm"),
    ((*SLURM, "--hosts", "10.0.0.1"), "--hosts is for --on mlx"),
    ((*SLURM, "--node-rank", "0"), "--node-rank is for --on local"),
    (("--on", "ray"), "'ray' is not one of 'local', 'mlx', 'slurm'"),
    (("--on", "slurm"), "--on slurm needs --gpus-per-node, or --procs"),
    ((*LOCAL, "--nodes", "2"), "Give --nodes, --node-rank and --rendezvous together"),
    ((*LOCAL, "--rendezvous", "a:1"), "Give --nodes, --node-rank and --rendezvous together"),
    ((*LOCAL, *SEVERAL, "--max-restarts", "1"), "--max-restarts is for one machine"),
    ((*LOCAL, *SEVERAL[:-1], "a"), "--rendezvous: got 'a', allowed: HOST:PORT"),
    ((*LOCAL, *SEVERAL[:-1], "a:70000"), "--rendezvous: got 'a:70000'"),
    ((*LOCAL, "--nodes", "2", "--node-rank", "2", "--rendezvous", "a:1"), "--node-rank: got 2, allowed: 0 to 1"),
    ((*LOCAL, "--platform", "mlx"), "--platform: got 'mlx', --on local takes cuda or cpu"),
    ((*LOCAL, "--platform", "cuda:1"), "--platform: got 'cuda:1', --on local takes cuda or cpu"),
    ((*LOCAL, "--platform", "numpy"), "--platform: got 'numpy', --on local takes cuda or cpu"),
    ((*MLX, "--platform", "cpu"), "--platform: got 'cpu', --on mlx takes mlx"),
    ((*MLX, "--hosts", "mac-1,10.0.0.2"), "--hosts: got 'mac-1', allowed: IP addresses"),
    ((*MLX, "--hostfile", "h.json", "--procs", "2"), "give neither --hosts nor --procs"),
    ((*MLX, "--hostfile", "h.json"), "--hostfile: h.json cannot be read: No such file"),
    ((*MLX, "--hostfile", "c.yaml"), "--hostfile: c.yaml is not a hostfile of mlx.launch"),
    ((*SLURM, "--platform", "mlx"), "--platform: got 'mlx', --on slurm takes cuda or cpu"),
    (
        (*SLURM, "--gpus-per-node", "2", "--platform", "cpu"),
        "--gpus-per-node: got 2, allowed only with --platform cuda, not cpu",
    ),
    (("--on", "slurm", "--procs", "3", "--gpus-per-node", "2"), "--procs: got 3, allowed: 1 to 2"),
    ((*SLURM, "--sbatch-option", "nodes=2"), "got 'nodes=2', not allowed here: use --nodes"),
    ((*SLURM, "--sbatch-option", "no-requeue"), "not allowed here: preemption needs requeue"),
    ((*SLURM, "--sbatch-option", "a b=c"), "--sbatch-option: got 'a b=c', allowed: KEY=VALUE"),
    ((*SLURM, "--sbatch-option", "comment=a\n#SBATCH --uid=root"), "no quote, backslash or line break"),
    ((*SLURM, "--partition", 'a"'), "--partition: got 'a\"', allowed in a batch script: no quote"),
    ((*SLURM, "--array", "0-1", "--resume", "never"), "--resume: got never, which is not allowed with --array"),
    ((*LOCAL, "--set", "train.stepz=1"), "Did you mean 'steps'"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "message"), FORBIDDEN, ids=lambda value: value if isinstance(value, str) else "")
def test_refused_by_name(dualtune_main, config, args, message):
    result = dualtune_main("launch", config.name, *args)
    assert result.returncode == 2, result.stdout + result.stderr
    assert message in " ".join(result.stderr.split())
    assert sorted(path.name for path in config.parent.iterdir()) == ["c.yaml"]


def test_more_processes_than_gpus_are_refused():
    from dualtune.base.errors import ConfigError, EnvironmentFault
    from dualtune.train.launch.torchrun import Here

    with pytest.raises(ConfigError, match="--procs: got 3, allowed: 1 to 2, the GPUs of this machine"):
        Here(8, 2).launcher("cuda", 3, None)
    with pytest.raises(EnvironmentFault, match=r"no GPU was found \(driver asleep\)"):
        Here(8, 0, "driver asleep").launcher("cuda", 1, None)
    launcher, chosen = Here(8, 2).launcher("cuda", None, None)
    assert launcher.num_processes == 2 and chosen == "2 processes, one for each GPU"


def test_what_is_missing_is_named_with_what_installs_it(dualtune_main, config, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name, **_: None)
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert "pip install 'dualtune[mlx]'" in (result := dualtune_main("launch", "c.yaml", *MLX)).stderr
    assert result.returncode == 4
    assert "apt-get install slurm-client" in (result := dualtune_main("launch", "c.yaml", *SLURM)).stderr
    assert result.returncode == 4
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'dualtune[torch]'" in (result := dualtune_main("launch", "c.yaml", *LOCAL)).stderr
    assert result.returncode == 4


def test_never_is_refused_where_there_is_a_run(dualtune_main, config):
    (config.parent / "runs/first/checkpoints").mkdir(parents=True)
    for where in (LOCAL, MLX, SLURM):
        result = dualtune_main("launch", "c.yaml", *where, "--resume", "never", "--print")
        assert result.returncode == 2 and "already holds a run" in result.stderr
