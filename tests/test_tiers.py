"""The fast tier of the tests: its marks, and that every module of the package is in it. Read from the sources."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nasfast

TESTS = Path(__file__).parent
ROOT, PACKAGE = TESTS.parent, Path(nasfast.__file__).parent


def left_out() -> set[str]:
    """The marks of tests that `make test-fast` leaves out."""
    line = re.search(r"^FAST = not \((.*)\)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    return set(line[1].split(" or "))


def marks(node: ast.AST) -> set[str]:
    """Names in `pytest.mark.NAME` anywhere in node."""
    found = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Attribute))
    return {n.attr for n in found if n.value.attr == "mark"}


def is_fast(tree: ast.Module) -> bool:
    """Whether a test of this file is in the fast tier; a mark of one parameter does not leave the others out."""
    of_file = set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets):
            of_file |= marks(node.value)
    if of_file & left_out():
        return False
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    plain = [[d for d in test.decorator_list if "parametrize" not in marks(d)] for test in tests]
    return any(not left_out() & set().union(*map(marks, decorators)) for decorators in plain)


def module_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.Module, modules: set[str], name: str = "", *, package: bool = False) -> set[str]:
    """The modules that a source imports or starts as programs; `name` is its own, from which relative imports count."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = name.split(".")[: name.count(".") + 1 - node.level + package] if node.level else []
            base = ".".join([*parts, *filter(None, [node.module])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.List | ast.Tuple | ast.Call):
            words = [n.value for n in getattr(node, "elts", getattr(node, "args", [])) if isinstance(n, ast.Constant)]
            started = {after for word, after in zip(words, words[1:], strict=False) if word == "-m"}
            found |= started | {f"{module}.__main__" for module in started}
    # a module brings the packages in which it lies
    found |= {".".join(module.split(".")[:i]) for module in found for i in range(1, module.count(".") + 1)}
    return found & modules


def unreached(sources: dict[str, ast.Module], packages: set[str], starts: set[str]) -> set[str]:
    """Modules to which no import leads from `starts`; those of the top package, which brings most, do not count."""
    seen, todo = {"nasfast"}, list(starts)
    while todo:
        module = todo.pop()
        if module not in seen:
            seen.add(module)
            todo += imported(sources[module], set(sources), module, package=module in packages)
    return set(sources) - seen


def test_the_fast_tier_imports_every_module():
    """This module's own tests and fixtures do."""
    files = [f for f in PACKAGE.rglob("*.py") if "_triton" not in f.relative_to(PACKAGE).parts]
    sources = {module_of(file): ast.parse(file.read_text()) for file in files}
    packages = {module_of(file) for file in files if file.name == "__init__.py"}
    tests = [file for file in TESTS.rglob("test_*.py") if is_fast(ast.parse(file.read_text()))]
    tests += {file.with_name("conftest.py") for file in tests if file.with_name("conftest.py").exists()}
    starts = set().union(*(imported(ast.parse(file.read_text()), set(sources)) for file in tests))
    assert len(starts) > 50
    assert unreached(sources, packages, starts) == set()


def test_a_module_without_a_test_is_noticed():
    texts = {
        "nasfast": "from nasfast.c import x",
        "nasfast.a": "from .one import f",
        "nasfast.a.one": "import nasfast.b",
        "nasfast.a.two": "",
        "nasfast.b": "",
        "nasfast.c": "",
        "nasfast.__main__": "",
    }
    sources = {name: ast.parse(text) for name, text in texts.items()}
    assert unreached(sources, {"nasfast", "nasfast.a"}, {"nasfast.a"}) == {
        "nasfast.a.two",
        "nasfast.c",
        "nasfast.__main__",
    }
    program = imported(ast.parse("run([sys.executable, '-m', 'nasfast', 'doctor'])"), set(sources))
    assert program == {"nasfast", "nasfast.__main__"}


def test_files_of_other_tiers_are_told_from_fast_ones():
    slow = "@pytest.mark.slow\ndef test_a(): pass\n"
    assert not is_fast(ast.parse(slow))
    assert is_fast(ast.parse(slow + "def test_b(): pass"))
    assert not is_fast(ast.parse("pytestmark = pytest.mark.aot\ndef test_b(): pass"))
    one = "@pytest.mark.parametrize('x', [1, pytest.param(2, marks=pytest.mark.slow)])\ndef test_c(x): pass"
    assert is_fast(ast.parse(one))


def test_every_mark_of_a_tier_is_registered_and_left_out():
    (listed,) = re.findall(
        r"^markers = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE | re.DOTALL
    )
    registered = set(re.findall(r'^    "(\w+):', listed, flags=re.MULTILINE))
    assert left_out() == registered - {"gpu"}
