"""Builds the kernels in C++: `pip install` runs it, and `python setup.py build_ext --inplace` in a checkout.

By default for the one instruction set that this processor uses; BATON_KERNEL_SETS names others, separated by blanks, or
is `wheel`, all that a wheel holds, or `none`. Without a compiler nothing is built, and Baton uses torch's operators.
"""

import copy
import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))  # an isolated build does not put the folder there

from baton.modeling.kernels.instruction_sets import GENERIC, SETS, WHEEL_SETS, InstructionSet, is_x86, usable_sets  # noqa: E402

KERNELS = ROOT / "baton" / "modeling" / "kernels"
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-fvisibility=hidden", "-Wno-psabi")
CHOSEN = os.environ.get("BATON_KERNEL_SETS", "")
TUNING = () if CHOSEN or not is_x86() else ("-mtune=native",)
"""Orders instructions for this processor, where kernels are built for it alone."""


def chosen_sets() -> tuple[InstructionSet, ...]:
    """Return the instruction sets that kernels are built for."""
    if CHOSEN == "wheel":
        return WHEEL_SETS if is_x86() else (GENERIC,)
    if CHOSEN == "none":
        return ()
    return tuple(SETS[name] for name in CHOSEN.split()) or usable_sets()[:1]


def extensions() -> list[Extension]:
    """Return a library for each folder of sources and each instruction set."""
    folders = sorted({path.parent for path in KERNELS.glob("*/*.cpp")})
    headers = sorted(path.relative_to(ROOT) for path in KERNELS.glob("*/*.h"))
    return [
        Extension(
            f"baton.modeling.kernels.built.{folder.name}-{each.name}",
            sorted(str(path.relative_to(ROOT)) for path in folder.glob("*.cpp")),
            depends=[*map(str, headers), "setup.py", "baton/modeling/kernels/instruction_sets.py"],
            extra_compile_args=[f"-I{KERNELS}", *FLAGS, *each.flags, *TUNING],
            optional=not CHOSEN,  # an old compiler keeps nobody from installing Baton
        )
        for each in chosen_sets()
        for folder in folders
    ]


class BuildKernels(build_ext):
    """Builds libraries of C functions, which need no Python: several at a time, or none without a compiler."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or len(os.sched_getaffinity(0))

    def get_ext_filename(self, fullname: str) -> str:
        *folders, name = fullname.split(".")
        folder, _, instruction_set = name.partition("-")
        return str(Path(*folders, f"{folder}.{instruction_set}.so"))

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []

    def build_extensions(self) -> None:
        compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
        if compiler is None:
            print("there is no C++ compiler: Baton is installed without its kernels and uses torch's operators")
            self.extensions = []
            return
        # neither Python's flags nor its libraries: the kernels are the same with every build of Python
        programs = {"compiler_so": compiler, "linker_so": f"{compiler} -shared"}
        self.compiler.set_executables(**programs, **{f"{name}_cxx": program for name, program in programs.items()})
        self.compiler.include_dirs = []
        super().build_extensions()

    def copy_extensions_to_source(self) -> None:
        (KERNELS / "built").mkdir(exist_ok=True)
        super().copy_extensions_to_source()

    def build_extension(self, ext: Extension) -> None:
        own = copy.copy(self)  # several are built at a time, of the same files
        own.build_temp = str(Path(self.build_temp, ext.name))
        super(BuildKernels, own).build_extension(ext)


class AnyPython(bdist_wheel):
    """A wheel of one platform and every Python 3: its libraries are C functions."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPython})
