"""`python -m modeling.kernels`: builds all kernels for this machine, so that no first use has to wait for it."""

from modeling.kernels import native

for name in native.NAMES:
    print(f"{name}: {'ready' if native.load(name) else 'not for this machine'}")
