"""Downloads the wheels that tools/cuda_measure.sh needs. They are for a machine that has torch, Triton and
transformers, but no network.

`python tools/cuda_wheels.py FOLDER` downloads them with pip into a new folder, for Python 3.12 on x86-64, in the
versions of constraints.txt. Ray's wheel is packed again without its Java, rllib, llm and dashboard files. With these
files, the folder would exceed the limit of 64 MiB for transfers to such a machine.
"""

import subprocess
import sys
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

_CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
_MODEL = ("pydantic", "pydantic_core", "annotated-types", "typing-inspection", "typing_extensions", "llguidance")
_GRPC = ("grpcio", "grpcio-health-checking", "grpcio-reflection", "protobuf", "googleapis-common-protos")
_HTTP = ("fastapi", "starlette", "annotated-doc", "uvicorn", "httptools", "asgiref")
_TRACES = ("api", "sdk", "proto", "semantic-conventions", "instrumentation", "instrumentation-asgi", "util-http")
_EXPORTERS = ("common", "proto-common", "proto-grpc")
_OTHERS = ("gguf", "python-json-logger", "prometheus_client", "wrapt")
_RAY = ("ray", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py", "attrs", "msgpack", "click")
_REQUESTS = ("requests", "urllib3", "certifi", "idna", "charset-normalizer")
_OPENTELEMETRY = (f"opentelemetry-{name}" for name in (*_TRACES, *(f"exporter-otlp-{each}" for each in _EXPORTERS)))
PACKAGES = (*_MODEL, *_GRPC, *_HTTP, *_OPENTELEMETRY, *_OTHERS, *_RAY, *_REQUESTS)
_PLATFORMS = ("_2_31", "_2_28", "_2_17", "2014", "_2_5", "1")
"""Suffixes of pip's "manylinux" platform names, the newest first."""
_LEFT_OUT = ("ray/jars/", "ray/rllib/", "ray/llm/", "ray/dashboard/client/")


def download(folder: Path) -> None:
    """Download the wheels of all packages into a folder. Raises CalledProcessError if pip fails."""
    platforms = [f"--platform=manylinux{each}_x86_64" for each in _PLATFORMS]
    options = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp", *platforms]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "-c", str(_CONSTRAINTS), "-d", str(folder)]
    subprocess.run([*command, *PACKAGES], check=True)


def repack(wheel: Path, left_out: tuple[str, ...]) -> None:
    """Replace a wheel by one without the files in the folders `left_out`. Executable files stay executable, which
    `python -m zipfile` would not ensure."""
    whole = wheel.rename(wheel.with_suffix(".whole"))
    with ZipFile(whole) as source, ZipFile(wheel, "w") as target:
        for entry in source.infolist():
            if not entry.filename.startswith(left_out):
                target.writestr(entry, source.read(entry), ZIP_DEFLATED, 9)
    whole.unlink()


def main(folder: str) -> int:
    """Download all wheels into a folder, and make Ray's wheel smaller. Return the exit status."""
    wheels = Path(folder)
    download(wheels)
    for wheel in wheels.glob("ray-*.whl"):
        repack(wheel, _LEFT_OUT)
    num_bytes = sum(wheel.stat().st_size for wheel in wheels.iterdir())
    print(f"{len(PACKAGES)} wheels, {num_bytes / (1 << 20):.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
