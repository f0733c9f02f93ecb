"""Generates the Python stubs in baton/v1 from the protocol definitions in proto/, or checks that they are up to date.

`python tools/protos.py [--check] [--root ROOT]` writes the stubs. With `--check` it writes nothing, and exits with
status 1 if a stub is out of date.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

STUBS = Path("baton", "v1")
HANDWRITTEN = "__init__.py"


def generate(root: Path, out: Path) -> None:
    """Generate the Python modules for messages and services, with type stubs, in the folder `out`/baton/v1. Raises
    CalledProcessError if a proto is invalid."""
    protos = sorted(str(path.relative_to(root)) for path in (root / "proto").rglob("*.proto"))
    bin_folder = Path(sys.executable).parent
    plugins = [f"--plugin={name}={bin_folder / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    outputs = [
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet:{out}",
    ]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", "proto", *plugins, *outputs, *protos], cwd=root, check=True
    )


def stale(root: Path) -> list[str]:
    """Return one line for each difference between the stubs and proto/. Differences are changed, missing and
    superfluous stubs, and files in proto/ that are not .proto files."""
    foreign = [path for path in (root / "proto").rglob("*") if path.is_file() and path.suffix != ".proto"]
    found = [f"{path.relative_to(root)}: proto/ holds .proto files only: remove it" for path in sorted(foreign)]
    with tempfile.TemporaryDirectory() as folder:
        generate(root, Path(folder))
        fresh = _contents(Path(folder))
    present = _contents(root)
    for name in sorted(fresh.keys() | present.keys()):
        if name not in fresh:
            found.append(f"{name}: no proto makes this stub: remove it")
        elif fresh[name] != present.get(name):
            found.append(f"{name}: stale stub: run `make proto`")
    return found


def _contents(root: Path) -> dict[str, bytes]:
    files = (path for path in (root / STUBS).glob("*.py*") if path.name != HANDWRITTEN)
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def main() -> int:
    """Write or check the stubs, depending on the command line. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; report stale stubs")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the project's root")
    args = parser.parse_args()
    if not args.check:
        generate(args.root, args.root)
        return 0
    found = stale(args.root)
    print("\n".join(found) if found else "stubs: all match proto/")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
