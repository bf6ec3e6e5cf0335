"""Install peers, each in a virtual environment of its own, and write the model that all engines run.

    python setup_peers.py                   all of them, about 8 GB
    python setup_peers.py vllm openvino     some
    python setup_peers.py model             only the model, which every comparison needs

A peer that cannot be installed is reported, and the others go on. Nothing outside $PEERS_HOME is changed.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from catalogue import HERE, INSTALLS, Install, find_tcmalloc, home, model_folder, openvino_folder


def main() -> int:
    """Install what was asked for; 1 when something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"model, {', '.join(INSTALLS)}; all when none is given")
    names = parser.parse_args().names or ["model", *INSTALLS]
    unknown = [name for name in names if name not in ("model", *INSTALLS)]
    if unknown:
        parser.error(f"unknown name {unknown[0]!r}; known are model, {', '.join(INSTALLS)}")
    failed = [name for name in dict.fromkeys(["model", *names]) if not succeeds(name)]
    print(f"in {home()}:", "all is there" if not failed else f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def succeeds(name: str) -> bool:
    """Install one, and say why where that fails."""
    print(f"== {name}", flush=True)
    try:
        write_model() if name == "model" else install(INSTALLS[name])
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"{name} failed: {error}")
        return False
    return True


def write_model() -> None:
    """With the Python that runs this, which has Treadle."""
    if not model_folder().exists():
        run(sys.executable, str(HERE / "make_model.py"))


def install(wanted: Install) -> None:
    """Make the environment, unless its receipt says that it is whole, and what else the peer needs."""
    if not wanted.is_installed:
        if not wanted.python.exists():
            venv.create(wanted.folder, with_pip=True)
        pip = (str(wanted.python), "-m", "pip")
        run(*pip, "install", "--quiet", *wanted.requirements)
        if wanted.unwanted:
            run(*pip, "uninstall", "--quiet", "--yes", *wanted.unwanted)
    if wanted.name == "vllm":
        unpack_tcmalloc()
    if wanted.name == "openvino":
        export_openvino(wanted)
    wanted.write_receipt()


def unpack_tcmalloc() -> None:
    """Fetch the Debian package of the allocator and unpack it, unless the system has it. Needs no rights."""
    if find_tcmalloc() is not None:
        return
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        print("vllm runs faster with libtcmalloc_minimal, which this system does not have; install it to be fair to vllm")
        return
    with tempfile.TemporaryDirectory() as scratch:
        run("apt-get", "download", "--quiet", "libtcmalloc-minimal4", folder=Path(scratch))
        for package in Path(scratch).glob("*.deb"):
            run("dpkg", "-x", str(package), str(home() / "tcmalloc"))


def export_openvino(wanted: Install) -> None:
    """Convert the model; float16 is how OpenVINO stores what it computes in bfloat16."""
    folder = openvino_folder()
    if folder.exists():
        return
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = str(wanted.folder / "bin" / "optimum-cli")
    options = ("--task", "text-generation-with-past", "--weight-format", "fp16")
    run(command, "export", "openvino", "--model", str(model_folder()), *options, str(unfinished))
    unfinished.rename(folder)


def run(*command: str, folder: Path | None = None) -> None:
    """Run a command; raises CalledProcessError."""
    subprocess.run(command, check=True, cwd=folder)  # noqa: S603  # our own commands


if __name__ == "__main__":
    if platform.system() != "Linux":
        sys.exit("the comparison reads /proc and stops processes by signals: it needs Linux")
    sys.exit(main())
