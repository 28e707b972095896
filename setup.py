"""The optional native parts: built when a compiler is there, done without where not."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            f"kvtiers.{name}",
            sources=[f"src/kvtiers/{name}.c"],
            extra_compile_args=["-O3"],
            optional=True,
        )
        for name in ("_digests", "_copy", "_ghosts")
    ]
)
