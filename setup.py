"""The optional native part: built when a compiler is there, done without where not."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kvtiers._native",
            sources=["src/kvtiers/_native.c"],
            extra_compile_args=["-O3"],
            optional=True,
        )
    ]
)
