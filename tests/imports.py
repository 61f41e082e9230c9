"""Reads what the modules of nasfast import, from their sources."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import nasfast

ROOT = Path(nasfast.__file__).parent
NATIVE = {"nasfast._C", "nasfast._triton"}


@dataclass(frozen=True)
class Import:
    """One imported module, as written in `module`, line `line`."""

    module: str
    target: str
    line: int
    in_function: bool
    typing_only: bool = False


def _typing_only(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _as_program(test: ast.expr) -> bool:
    return ast.unparse(test) == "__name__ == '__main__'"


def _walk(node: ast.AST, in_function: bool = False, typing_only: bool = False) -> Iterator[tuple[ast.AST, bool, bool]]:
    """Nodes with whether they are inside a function, and whether only a type checker reads them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and _as_program(child.test):
            continue
        if isinstance(child, ast.If) and _typing_only(child.test):
            for block, typed in ((child.body, True), (child.orelse, typing_only)):
                for other in block:
                    yield other, in_function, typed
                    yield from _walk(other, in_function, typed)
            continue
        inside = in_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield child, inside, typing_only
        yield from _walk(child, inside, typing_only)


def imports_of(module: str, source: str, modules: set[str]) -> list[Import]:
    """What a module imports; `from package import name` is the module of that name where there is one."""
    found = []
    package = module if f"{module}.__init__" in modules else module.rpartition(".")[0]
    for node, inside, typed in _walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [Import(module, alias.name, node.lineno, inside, typed) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(parents[: len(parents) - node.level + 1] + ([base] if base else []))
            for alias in node.names:
                name = f"{base}.{alias.name}"
                is_module = name in modules or name in NATIVE or f"{name}.__init__" in modules
                found.append(Import(module, name if is_module else base, node.lineno, inside, typed))
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__")
            and node.args
        ):
            target = node.args[0]
            if isinstance(target, ast.Constant) and isinstance(target.value, str):
                # a module-level call does what an import statement does
                found.append(Import(module, target.value, node.lineno, inside, typed))
    return found


def read_sources() -> dict[str, str]:
    sources = {}
    for path in ROOT.rglob("*.py"):
        parts = ("nasfast", *path.relative_to(ROOT).with_suffix("").parts)
        if parts[1] == "_triton":  # the installed form of kernels/, part of the operators
            continue
        sources[".".join(parts)] = path.read_text()
    return sources


def module_names(sources: Iterable[str]) -> set[str]:
    """Names of modules; a package stands under its own name and as `package.__init__`, which marks it as one."""
    return {name.removesuffix(".__init__") for name in sources} | {n for n in sources if n.endswith(".__init__")}


def imports_in(sources: Mapping[str, str]) -> list[Import]:
    """Every import of the modules; `sources` maps their names to their texts, see `module_names`."""
    modules = module_names(sources)
    return [i for name, text in sources.items() for i in imports_of(name.removesuffix(".__init__"), text, modules)]
