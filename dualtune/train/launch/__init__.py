"""Starting a run as several processes: by torchrun or mlx.launch here, or as a Slurm job."""
