"""Which small errors can be made in a line of Python or C++: what tests/mutants.py draws from.

Operators and comparisons are swapped, constants get 1 more or less, truth values are flipped, conditions negated,
results dropped, statements deleted. Comments, docstrings, types, imports, texts and messages stay as they are.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "/", "/": "*",
    "//": "*", "%": "*", "and": "or", "or": "and", "&&": "||", "||": "&&", "+=": "-=", "-=": "+=", "*=": "/=",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in", "true": "false", "false": "true",
    "True": "False", "False": "True", "std::min": "std::max", "std::max": "std::min",
}  # fmt: skip
MESSAGES = re.compile(r"(\w*log\w*\.)?(debug|info|warning|warn|error|log|print|getLogger)$", re.IGNORECASE)


class Line(NamedTuple):
    text: str
    scope: str  # function or class, "" outside
    sites: list[tuple[int, int, str]]  # (start, end, text instead) of what can be changed


@functools.cache
def lines_of(path: Path) -> list[Line]:
    text = path.read_text(encoding="utf-8")
    return python_lines(text) if path.suffix == ".py" else cpp_lines(text)


class Sites(ast.NodeVisitor):
    """Collects the sites and scopes of a module."""

    def __init__(self, text: str) -> None:
        self.texts = text.splitlines()
        self.sites: list[list[tuple[int, int, str]]] = [[] for _ in self.texts]
        self.scopes = [""] * len(self.texts)
        self.names: list[str] = []
        self.visit(ast.parse(text))

    def add(self, line: int, start: int, end: int, text: str) -> None:
        """`start` and `end` count bytes, as in ast."""
        before = self.texts[line - 1].encode()
        self.sites[line - 1].append((len(before[:start].decode()), len(before[:end].decode()), text))

    def replace(self, node: ast.AST, text: str) -> None:
        """Only where the node is on one line; `{}` is its own text."""
        if node.lineno == node.end_lineno:
            code = self.texts[node.lineno - 1].encode()[node.col_offset : node.end_col_offset].decode()
            self.add(node.lineno, node.col_offset, node.end_col_offset, text.format(code))

    def swap(self, left: ast.AST, right: ast.AST) -> None:
        """The operator between two operands that are on one line."""
        if left.end_lineno == right.lineno:
            between = self.texts[right.lineno - 1].encode()[left.end_col_offset : right.col_offset].decode()
            match = re.search(r"[^\s()]+( not\b| in\b)?", between)
            if match and match[0] in SWAPS:
                start = left.end_col_offset + match.start()
                self.add(right.lineno, start, start + len(match[0]), SWAPS[match[0]])

    def visit_ClassDef(self, node) -> None:
        self.names.append(node.name)
        for line in range(min([node.lineno, *(each.lineno for each in node.decorator_list)]), node.end_lineno + 1):
            self.scopes[line - 1] = ".".join(self.names)
        self.generic_visit(node)
        self.names.pop()

    def visit_FunctionDef(self, node) -> None:
        node.returns = None  # an annotation
        self.visit_ClassDef(node)

    def skip(self, node: ast.AST) -> None:
        pass

    visit_Raise = visit_Import = visit_ImportFrom = visit_JoinedStr = skip

    def visit_arg(self, node: ast.arg) -> None:
        pass  # only an annotation

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
            self.swap(left, right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.swap(left, right)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.swap(node.left, node.right)
        self.generic_visit(node)

    def visit_If(self, node) -> None:
        self.replace(node.test, "not ({})")
        self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self.replace(condition, "(not ({}))")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self.replace(node.value, "None")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace(node, str(not node.value))
        elif isinstance(node.value, (int, float)):
            self.replace(node, "({} + 1)")
            self.replace(node, "({} - 1)")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and not MESSAGES.match(ast.unparse(node.value.func)):
            self.replace(node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.swap(node.target, node.value)
        self.replace(node, "pass")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if not MESSAGES.match(ast.unparse(node.func)):
            self.generic_visit(node)


def python_lines(text: str) -> list[Line]:
    found = Sites(text)
    return [Line(*line) for line in zip(found.texts, found.scopes, found.sites, strict=True)]


COMMENTS_AND_TEXTS = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'", re.DOTALL)
# what this machine does not compile: other processors, GPUs
OTHER_MACHINES = re.compile(r"#\s*if.*(AVX|AMX|__aarch64__|__ARM|CUDA|__GNUC__|__clang__|X86_ISAS)")
HEAD = re.compile(r"(?:.*\b(?:struct|class|enum) (\w+)[^;]*|[\w:<].*?\b(\w+)\(.*)$")
FIXED = re.compile(r"\s*(#|static_assert|template|using|typedef|namespace|extern)")


def cpp_lines(text: str) -> list[Line]:
    masked = COMMENTS_AND_TEXTS.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text).splitlines()
    lines, scope, others = [], "", [False]  # others: of each #if around, whether another machine compiles this part
    for line, code in zip(text.splitlines(), masked, strict=True):
        if re.match(r"#\s*if", code):
            others.append(bool(OTHER_MACHINES.match(code)) and "!defined" not in code)
        elif re.match(r"#\s*(else|elif)", code):
            others[-1] = bool(OTHER_MACHINES.match(code.replace("elif", "if")))
        elif re.match(r"#\s*endif", code):
            others.pop()
        elif (head := HEAD.match(code)) and not FIXED.match(code):
            scope = head[1] or head[2]
        usable = not any(others) and not FIXED.match(code)
        lines.append(Line(line, scope, cpp_sites(code) if usable else []))
    return lines


def cpp_sites(code: str) -> list[tuple[int, int, str]]:
    """clang-format puts spaces around binary operators, and none around those of pointers and templates."""
    sites = []
    for match in re.finditer(r"(?<= )([-+*/%<>=!&|]{1,2})(?= )|\b(?:true|false|std::min|std::max)\b", code):
        if match[0] in SWAPS:
            sites.append((*match.span(), SWAPS[match[0]]))
    for match in re.finditer(r"(?<![\w.'])\d+(?![\w.'])", code):
        sites += [(*match.span(), str(int(match[0]) + 1)), (*match.span(), str(abs(int(match[0]) - 1)))]
    if match := re.match(r"\s*(?:} else )?if (?:constexpr )?\((.*)\) (?:{|\w+;|\w+ |\w+\()", code):
        if balanced(match[1]):
            sites.append((*match.span(1), f"!({match[1]})"))
    if match := re.search(r"\breturn ([^;{]+);", code):
        sites.append((*match.span(1), "{}"))
    if match := re.match(r"\s+((?!return\b|delete\b)[\w:.>\[\]-]+(?:\(.*\)| [-+*/|&]= .*);)$", code):
        if balanced(match[1]):
            sites.append((*match.span(1), ";"))
    return sites


def balanced(code: str) -> bool:
    """Whether every bracket that closes was opened before, and all are closed."""
    depths = [code[: i + 1].count("(") - code[: i + 1].count(")") for i in range(len(code))]
    return min(depths, default=0) >= 0 and depths[-1:] == [0]
