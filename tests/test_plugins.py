"""Entry points are read once, and again when a package was installed."""

from dualtune.base import plugins

GROUP = "a.group"


def test_entry_points_are_read_again_when_a_package_was_installed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    read, reads = plugins.entry_points, []
    monkeypatch.setattr(plugins, "entry_points", lambda group: reads.append(group) or read(group=group))
    assert plugins.points_of(GROUP) == plugins.points_of(GROUP) == () and reads == [GROUP]
    info = tmp_path / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nplus = operator:add\n[other.group]\nminus = operator:sub\n")
    (point,) = plugins.points_of(GROUP)
    assert point.name == "plus" and point.load()(1, 2) == 3 and reads == [GROUP] * 2
