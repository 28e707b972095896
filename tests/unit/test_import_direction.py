"""Imports point downward only, the core is sealed, and what says so imports without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvtiers

SOURCE = Path(kvtiers.__file__).parent

LAYERS = (
    {"cli"},
    {"validation"},
    {"demo"},
    {"server", "planner"},
    {"engine"},
    {"scheduling"},
    {"runtime"},
    {"transfer", "storage"},
    {"metrics", "workload"},
    {"core"},
    {"events", "digests"},
    {"types"},
    {"errors"},
)
"""Highest first. A module imports what is in a layer below its own, or in its own package.

`testing` stands beside `engine`: it may import what is below that, and of all others only `cli`,
`demo` and `engine` (for its tiny models) may import it.
"""

IMPORTED_WITHOUT_TORCH = (
    "core",
    "metrics",
    "workload",
    "planner",
    "scheduling",
    "runtime",
    "transfer",
    "storage",
)

SEALED = {"time", "random", "logging", "threading", "os", "io", "pathlib", "asyncio", "socket"}
"""What the core must not know: clocks, chance, logs, threads, files."""

_LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}


def _modules() -> list[tuple[str, Path]]:
    return [
        (str(path.relative_to(SOURCE)), path)
        for path in sorted(SOURCE.rglob("*.py"))
        if path != SOURCE / "__init__.py"
    ]


def _package(relative: str) -> str:
    return relative.split("/")[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """Every module that a file imports, also inside functions, but not for type checking only."""
    names: set[str] = set()
    tree = ast.parse(path.read_text())
    for_types_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types_only:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide their direction"
            assert node.module is not None
            names.add(node.module)
            if node.module == "kvtiers":
                names.update(f"kvtiers.{alias.name}" for alias in node.names)
    return names


def _own_packages(path: Path) -> set[str]:
    return {name.split(".")[1] for name in _imports(path) if name.startswith("kvtiers.")}


@pytest.mark.parametrize(("name", "path"), _modules(), ids=[name for name, _ in _modules()])
def test_a_module_imports_only_what_lies_below_it(name: str, path: Path) -> None:
    package = _package(name)
    for imported in _own_packages(path) - {package}:
        if imported.startswith("_"):
            continue  # a native extension module: it imports nothing
        if package == "testing":
            assert _LEVEL[imported] >= _LEVEL["engine"], f"testing imports {imported}"
        elif imported == "testing":
            assert package in {"cli", "demo", "engine"}, f"{package} imports testing"
        else:
            assert _LEVEL[imported] > _LEVEL[package], f"{package} imports {imported}, above it"


def test_every_package_has_its_layer() -> None:
    packages = {_package(name) for name, _ in _modules()} - {"testing"}
    assert packages <= set(_LEVEL), f"no layer for {packages - set(_LEVEL)}"


@pytest.mark.parametrize(
    ("name", "path"),
    [module for module in _modules() if module[0].startswith("core/")],
    ids=[name for name, _ in _modules() if name.startswith("core/")],
)
def test_the_core_knows_no_clock_chance_log_thread_or_file(name: str, path: Path) -> None:
    outside = {module.split(".")[0] for module in _imports(path)} - {"kvtiers"}
    assert not outside & SEALED
    assert "open(" not in path.read_text()
    assert outside <= set(sys.stdlib_module_names) | {"numpy"}


@pytest.mark.parametrize("package", IMPORTED_WITHOUT_TORCH)
def test_a_package_imports_without_torch(package: str) -> None:
    modules = [
        "kvtiers." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name, _ in _modules()
        if _package(name) == package
    ]
    # A module set to None raises ImportError when somebody imports it.
    code = (
        "import sys, importlib\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
