"""Clones of Megatron-LM at the supported tags, patches for them, and the support page."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import make_support_doc
import pytest
import support_runs
from support_runs import Failed, Numbers, code_hash, probe

from megatron_edit.host.seams import probes
from megatron_edit.host.seams.probes import OLDER_PACKAGES, PROBES, Probe
from megatron_edit.tools.cli import main
from megatron_edit.tools.cli.patch import LINE
from megatron_edit.versions import RELEASES, Release
from tests.harness.launch import REPOSITORY
from tests.harness.ports import free_ports
from tests.host.runs import edit_flags

CLONES = "MEGATRON_LM_DIRS"


def clones() -> list[Path]:
    """Return the available clones at any of the tags."""
    return [Path(x) for x in os.environ.get(CLONES, "").split(os.pathsep) if x]


def script(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the project."""
    env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(REPOSITORY / "scripts" / words[0]), *words[1:]]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=100, check=False
    )


def test_support_page_is_current() -> None:
    """Would catch a probe, a release or a run without results of the clones, and results that were
    made with other code."""
    done = script("make_support_doc.py", "--check")
    assert done.returncode == 0, done.stderr


def test_results_of_other_code_are_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a table that stays as it is when the code that it is about changes."""
    data = {
        release.tag: {
            "version": "1", "failed": [], "symbols": [*map(str, PROBES)],
            "runs": dict.fromkeys(make_support_doc.RUNS, "yes"), "code": code_hash(),
        }
        for release in RELEASES
    }  # fmt: skip
    monkeypatch.setattr(make_support_doc, "REPOSITORY", tmp_path)
    monkeypatch.setattr(make_support_doc, "DATA", tmp_path / "data.json")
    monkeypatch.setattr(make_support_doc, "TARGET", tmp_path / "page.md")
    for code, expected in ((data["main"]["code"], 0), ("other", 1)):
        data["main"]["code"] = code
        (tmp_path / "data.json").write_text(json.dumps(data))
        (tmp_path / "page.md").write_text(make_support_doc.page(data, "text\n"))
        assert make_support_doc.main(["--check"]) == expected
    message = "main was tried with other code of host/, engine/ or comm/"
    assert message in (printed := capsys.readouterr().err) and make_support_doc.COMMAND in printed


def test_hash_of_code_ignores_what_does_not_run(tmp_path: Path) -> None:
    """Docstrings, comments and line breaks do not count; code and names of files do."""
    file = tmp_path / "host" / "a.py"
    file.parent.mkdir()
    hashes = []
    for source in (
        'def f(x):\n    """Old."""\n    return g(x, 1)\n',
        '"""New."""\n\n\ndef f(x):\n    # why\n    return g(\n        x,\n        1,\n    )\n',
        "def f(x):\n    return g(x, 2)\n",
    ):
        file.write_text(source)
        hashes.append(code_hash(tmp_path))
    file.rename(file.with_name("b.py"))
    hashes.append(code_hash(tmp_path))
    assert hashes[0] == hashes[1] and len(set(hashes)) == 3


def test_numbers_that_differ_fail() -> None:
    """Would catch a row that says yes for other numbers, or because there were none."""
    norms = [{1: 3.0, 2: 4.0}]
    good = Numbers({1: 1.0, 2: 2.0}, norms, ("a", "b"))
    good.check_equal(Numbers(good.losses, norms, ("0", "a", "b")))
    good.check_close(Numbers({1: 1.0, 2: 2.0 + 1e-6}, norms))
    for other in (
        Numbers({1: 1.0, 2: 2.1}, norms, ("a", "b")),
        Numbers(good.losses, norms, ("a",)),
    ):
        with pytest.raises(Failed):
            good.check_equal(other)
    for losses, others in (
        ({1: 1.0, 2: 2.1}, norms), (good.losses, [{1: 3.0, 2: 4.1}]), (good.losses, [{1: 3.0}]),
        ({1: 1.0}, norms),
    ):  # fmt: skip
        with pytest.raises(Failed):
            good.check_close(Numbers(losses, others))
    without = Numbers(good.losses, [])
    with pytest.raises(Failed):
        without.check_equal(good)
    with pytest.raises(Failed):
        without.check_close(good)


def test_packages_of_older_releases_are_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone that lacks one is refused with a line that names the extra."""
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    packages = extras["optional-dependencies"]["older-megatron"]
    assert {re.split(r"[>=]", name)[0] for name in packages} == set(OLDER_PACKAGES)
    monkeypatch.setitem(sys.modules, "six", None)
    monkeypatch.setattr(probes, "PROBES", [Probe("six", "PY3")])
    ((_, why),) = probes.failed_probes().items()
    assert "imports the package six" in why and "megatron_edit[older-megatron]" in why


def test_clones_are_made_from_a_git_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at each tag, or at the commit of a branch."""
    git = ["git", "-C", str(tmp_path / "source"), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git[:1], "init", "--quiet", str(tmp_path / "source")], check=True, timeout=30)
    releases = []
    for number, name in enumerate(("old", "new")):
        (tmp_path / "source" / "name").write_text(name)
        subprocess.run([*git, "add", "."], check=True, timeout=30)
        subprocess.run([*git, "commit", "--quiet", "-m", name], check=True, timeout=30)
        subprocess.run([*git, "tag", name], check=True, timeout=30)
        releases.append(Release(0, number, name))
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, timeout=30, capture_output=True, text=True
    )
    releases.append(Release(0, 2, "branch", head.stdout.strip()))
    monkeypatch.setattr(support_runs, "RELEASES", releases)
    made = support_runs.make_clones(tmp_path / "source" / ".git", tmp_path)
    assert [path.name for path in made] == ["old", "new", "branch"]
    assert [(path / "name").read_text() for path in made] == ["old", "new", "new"]


def test_every_release_has_trained() -> None:
    """Would catch a supported tag without a successful training."""
    data = json.loads((REPOSITORY / "docs" / "support.json").read_text())
    for release in RELEASES:
        runs = data[release.tag]["runs"]
        assert set(runs) == set(make_support_doc.RUNS) and set(runs.values()) == {"yes"}, release
        assert [x for x in data[release.tag]["failed"] if not x[1]] == [], release


@pytest.mark.full
@pytest.mark.parametrize("version", ["0.17.0", "0.18.2"])
def test_older_wheels_have_required_symbols(version: str, tmp_path: Path) -> None:
    """For machines without clones. Would catch a required symbol that only 0.19 has."""
    install = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path),
        f"megatron-core=={version}",
    ]  # fmt: skip
    if subprocess.run(install, timeout=200, check=False).returncode:
        pytest.skip(f"the package index gives no megatron-core {version}")
    failed = probe(tmp_path)["failed"]
    assert [symbol for symbol, needed_for, _ in failed if not needed_for] == []


def test_patches_contain_only_our_line() -> None:
    """Would catch a line of Megatron in a patch, as context or in a hunk header."""
    folders = {path.name for path in (REPOSITORY / "patches").iterdir() if path.is_dir()}
    assert folders == {release.tag for release in RELEASES}
    for path in (REPOSITORY / "patches").rglob("*.patch"):
        head, *_, hunk, line = path.read_text().splitlines()
        assert head.startswith("diff --git a/pretrain_") and hunk.endswith(" @@")
        assert line == "+" + LINE
        assert len(path.read_text().splitlines()) == 5


@pytest.mark.clone
def test_patches_match_patch_command() -> None:
    if not clones():
        pytest.skip(f"needs clones of Megatron-LM in {CLONES}")
    done = script("make_patches.py", "--check", *map(str, clones()))
    assert done.returncode == 0, done.stderr


@pytest.mark.clone
def test_git_apply_matches_patch_command(tmp_path: Path, megatron_clone: Path) -> None:
    """Patching and reverting by git and by the command give the same files."""
    folders = [tmp_path / "git", tmp_path / "command"]
    before = {}
    for folder in folders:
        (folder / "megatron" / "core").mkdir(parents=True)
        shutil.copy(megatron_clone / "megatron/core/package_info.py", folder / "megatron/core")
        for path in megatron_clone.glob("pretrain_*.py"):
            before[path.name] = Path(shutil.copy(path, folder)).read_bytes()
    patches = sorted((REPOSITORY / "patches" / "core_v0.19.0").glob("*.patch"))

    def git(*words: str) -> None:
        command = ["git", "apply", *words, "--unidiff-zero", *map(str, patches)]
        subprocess.run(command, cwd=folders[0], check=True, timeout=30)

    def contents() -> list[dict[str, bytes]]:
        return [{p.name: p.read_bytes() for p in folder.glob("*.py")} for folder in folders]

    git()
    assert main(["patch", str(folders[1])]) == 0
    assert contents()[0] == contents()[1] != before
    git("-R")
    assert main(["patch", str(folders[1]), "--revert"]) == 0
    assert contents() == [before, before]


@pytest.mark.clone
def test_patched_clone_trains_without_launcher(tmp_path: Path, megatron_clone: Path) -> None:
    """With torchrun pretrain_gpt.py --use-edit; with the launcher, too, it is activated once."""
    copy = tmp_path / "Megatron-LM"
    ignored = shutil.ignore_patterns(".git", "tests", "docs")
    shutil.copytree(megatron_clone, copy, ignore=ignored)
    assert main(["patch", str(copy)]) == 0
    found = []
    for name, launcher in (("patched", []), ("both", ["-m", "megatron_edit"])):
        flags = edit_flags(2, edit_log_dir=tmp_path / name, train_iters=20, global_batch_size=4)
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--master-port={free_ports(1)[0]}",
            "--nproc-per-node=2", *launcher, str(copy / "pretrain_gpt.py"), *flags,
        ]  # fmt: skip
        added = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(
            command, env=os.environ | added, cwd=tmp_path, capture_output=True, text=True,
            timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        assert done.stdout.count("device cpu (auto)") == 1
        found.append([json.loads(x)["loss"] for x in (tmp_path / name / "loss.jsonl").open()])
    assert found[0] == found[1] and len(found[0]) == 20
