"""`info`, also as a command: what it prints of the installation."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

import jax_sparse24 as s24
from jax_sparse24 import installation, versions
from jax_sparse24.dispatch import hardware, native, table


def check_info(out):
    assert re.match(r"jax_sparse24 (\d+\.\d+\.\d+.*|not installed), Python 3\.\d+", out)
    for package in ("jax", "jaxlib", "flax", "optax"):
        assert re.search(rf"^  {package} +\d+\.\d+", out, re.MULTILINE), package
    assert re.search(r"^  cpu:0 ", out, re.MULTILINE)
    states = dict(re.findall(r"^  (reference|ffi|cusparselt) +(on|off) +\S+", out, re.MULTILINE))
    assert set(states) == {"reference", "ffi", "cusparselt"}
    assert states["reference"] == "on"
    for line in out.splitlines():
        if re.match(r"  \w+ +off ", line):
            assert len(line.split(" off ")[1].strip()) > 10, "what is off needs a reason"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="lists the CPU")
def test_info_names_versions_devices_and_implementations(capsys):
    s24.info()
    out = capsys.readouterr().out
    check_info(out)
    assert re.search(r"^  ffi +on +.*FFI API \d+\.\d+", out, re.MULTILINE)
    assert re.search(r"^  ffi \(CUDA\)  (off .*|on .*; no CUDA device is here)$", out, re.MULTILINE)
    assert re.search(
        r"^where none is named: (the faster, as measured on|dense products; run s24.tune)", out, re.M
    )


@pytest.mark.parametrize("runs", [True, False])
def test_info_says_what_takes_the_place_of_cusparselt(runs, capsys, monkeypatch):
    monkeypatch.setattr(installation, "library_obstacle", lambda: "it does not open")
    monkeypatch.setattr(hardware, "runs_code", lambda code: runs and code == "sm_90a")
    s24.info()
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  cusparselt"))
    assert line.startswith("  cusparselt  off   it does not open")
    assert ("our kernel takes its place" in line) == runs


def test_info_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "jax_sparse24.info"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={"JAX_PLATFORMS": "cpu", "PATH": ""},
    )
    check_info(done.stdout)
    assert done.stderr == ""


@pytest.mark.slow
def test_info_takes_no_option_but_help():
    usage = "usage: python -m jax_sparse24.info"
    for option, status, said in ("--help", 0, usage), ("--json", 2, "unrecognized arguments: --json"):
        words = [sys.executable, "-m", "jax_sparse24.info", option]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, env={"PATH": ""})
        assert done.returncode == status and said in done.stdout + done.stderr, done.stderr
        assert "packages:" not in done.stdout


def test_a_type_checker_finds_the_package(tmp_path):
    """In a folder on Python's path, also after `pip install -e`: checkers run no finder of setuptools."""
    code = "from importlib.machinery import PathFinder; print(PathFinder.find_spec('jax_sparse24').origin)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, env=environment, text=True)
    assert (Path(found).parent / "py.typed").exists()


@pytest.mark.slow
def test_info_when_no_device_answers():
    """As with a CUDA plugin on a machine without a GPU, or with one that does not start."""
    code = """if True:
        import jax
        def devices(*_):
            raise RuntimeError("Unable to initialize backend 'cuda': no device\\nmore")
        jax.devices = jax.local_devices = jax.default_backend = devices
        import jax_sparse24 as s24
        s24.info()
    """
    for run, platforms in (["-c", code], "cpu"), (["-m", "jax_sparse24.info"], "cuda"):
        done = subprocess.run(
            [sys.executable, *run],
            capture_output=True,
            text=True,
            timeout=120,
            env={"JAX_PLATFORMS": platforms, "PATH": ""},
        )
        if platforms == "cuda" and "gpu:0" in done.stdout:
            continue
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        assert re.search(r"^  no device answers: \S+", done.stdout, re.M), done.stdout
        assert re.search(r"^  cusparselt +off   no device answers", done.stdout, re.M), done.stdout


def test_info_says_why_the_kernels_are_off(capsys, monkeypatch):

    reason = "the native module jax_sparse24._cpu is not installed; `pip install -e .` builds it"
    monkeypatch.setattr(native, "_loaded", dict.fromkeys(native.PLATFORMS, (None, reason)))
    s24.info()
    assert re.search(rf"^  ffi +off +{re.escape(reason)}", capsys.readouterr().out, re.MULTILINE)
    s24.explain(s24.methods.FST())
    assert reason in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="pip install"):
        s24.explain(s24.methods.FST(), implementation="ffi")


@pytest.mark.parametrize(
    ("package", "found", "how"),
    [
        ("jax", "0.10.1", "old"),
        ("jax", "0.13.0.dev20261101", "new"),
        ("jax", "1.0", "new"),
        ("jaxlib", "0.9.9", "old"),
        ("jaxlib", "0.13", "new"),
    ],
)
def test_another_jax_is_refused_before_it_is_imported(package, found, how, tmp_path):
    """In one sentence: what runs, what is there, and the fix."""
    metadata = tmp_path / f"{package}-{found}.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {found}\n")
    root = Path(versions.__file__).parent.parent
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(root)!r}]\nimport jax_sparse24"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    *_, last = done.stderr.strip().splitlines()
    assert last == (
        f"ImportError: jax_sparse24 {versions.__version__} runs with {package}>=0.10.2,<0.13, and {package} "
        f'{found} is too {how}: pip install "jax>=0.10.2,<0.13" "jaxlib>=0.10.2,<0.13".'
    )


@pytest.mark.parametrize("found", ["0.10.2", "0.11.3", "0.12.0.1", "0.12.99rc1"])
def test_a_jax_in_the_range_is_taken(found, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: found)
    versions.check()


def test_the_range_is_that_of_the_project():
    """pyproject.toml has it for pip, and takes the version of the package from it."""
    root = Path(versions.__file__).parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert f"jax>={versions.OLDEST},<{versions.BELOW}" in project["project"]["dependencies"]
    wheel = tomllib.loads((root / "cuda13/pyproject.toml").read_text())
    assert wheel["build-system"] == project["build-system"]
    for content in (project["build-system"], wheel["build-system"]):
        assert f"jaxlib=={versions.OLDEST}" in content["requires"]
    assert s24.__version__ == versions.__version__


def test_wheels_are_built_by_one_pip_for_a_python_that_has_none(tmp_path):
    """Debian's and Ubuntu's have none until it is installed. pip takes another Python by its path alone."""
    tools, there = tmp_path / "tools", tmp_path / "path"
    scripts = {
        tools / "python": f'mkdir -p dist && echo "$@" >> {tmp_path}/called',
        tools / "auditwheel": "",
        there / "python3.99": '[ "$1" = -c ]',
    }
    for file, script in scripts.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
    makefile = Path(__file__).parent.parent / "Makefile"
    words = ["make", "-f", makefile, "wheels", f"TOOLS={tools}", "PYTHONS=python3.98 python3.99"]
    paths = os.pathsep.join((str(there), os.environ["PATH"]))
    out = subprocess.check_output(words, cwd=tmp_path, env=os.environ | {"PATH": paths}, text=True)
    assert "There is no python3.98 here, and no wheel for it." in out
    upgrade, sdist, wheel = (tmp_path / "called").read_text().splitlines()
    assert upgrade.startswith("-m pip install ") and upgrade.endswith(" --upgrade pip")
    assert sdist.startswith("-m build --sdist ")
    assert wheel.startswith(f"-m pip --python {there / 'python3.99'} wheel ")


def test_environments_of_two_jaxlibs_keep_their_own_tables(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = table.user_folder()
    assert here == tmp_path / "jax_sparse24/tuning" / f"jaxlib-{table.versions()['jaxlib']}"
    monkeypatch.setattr(table, "versions", lambda: {"jaxlib": "0.99.0"})
    assert table.user_folder() == here.parent / "jaxlib-0.99.0"
