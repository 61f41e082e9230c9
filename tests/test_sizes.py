"""No source file has more than 500 lines and no function more than 80; few statements are formatted by hand."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("benchmarks", "csrc", "kernels", "nasfast", "tests")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80

# statements that are formatted by hand: tables of data and signatures of kernels
MAX_HAND_FORMATTED = 40

# C++: comments and literals, in which braces do not count; then heads of blocks that are not functions
LITERAL = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'", re.DOTALL)
CONTAINER = re.compile(r"\b(?:namespace|struct|class|union|extern)\b[^()]*$")


@functools.cache
def sizes():
    """{path: (lines, [(function, lines)])} of every source file."""
    files = [ROOT / "setup.py", *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*"))]
    found = {}
    # the folder that an installation links to nasfast/_triton is counted once
    for file in sorted({file.resolve() for file in files if file.suffix in FUNCTIONS}):
        text = file.read_text(encoding="utf-8")
        found[str(file.relative_to(ROOT))] = (text.count("\n"), FUNCTIONS[file.suffix](text))
    return found


def python_functions(text):
    """(name, lines) of every function, decorators not included."""
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return [(node.name, node.end_lineno - node.lineno + 1) for node in nodes]


def cpp_functions(text):
    """(head, lines) of every block that is in no other block but namespaces and classes: functions, and tables."""
    code = LITERAL.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    code = re.sub(r"^#[^\n]*", lambda match: " " * len(match[0]), code, flags=re.MULTILINE)
    found, blocks, head = [], [], 0  # head: where the current statement begins
    for at, char in enumerate(code):
        if char == "{":
            outer = all(container for container, _ in blocks)
            blocks.append((outer and CONTAINER.search(code[head:at]) is not None, head))
        elif char == "}":
            container, start = blocks.pop()
            if not container and all(outer for outer, _ in blocks):
                start += len(code[start:at]) - len(code[start:at].lstrip())
                found.append((code[start:at].split("{")[0].strip(), code.count("\n", start, at) + 1))
        if char in ";{}":
            head = at + 1
    return found


FUNCTIONS = {".py": python_functions, ".cpp": cpp_functions, ".h": cpp_functions, ".cu": cpp_functions}


def violations():
    """What is too long: {path: problems}."""
    found = {}
    for path, (lines, functions) in sizes().items():
        problems = [f"{lines} lines"] if lines > MAX_FILE_LINES else []
        problems += [f"{name}: {length} lines" for name, length in functions if length > MAX_FUNCTION_LINES]
        if problems:
            found[path] = problems
    return found


def test_no_file_and_no_function_is_too_long():
    assert violations() == {}


def test_every_kind_of_source_is_measured():
    counts = dict.fromkeys(FUNCTIONS, 0)
    for path, (_, functions) in sizes().items():
        counts[Path(path).suffix] += len(functions)
    assert counts[".py"] > 2000 and counts[".cpp"] > 200 and counts[".h"] > 100 and counts[".cu"] > 10


def hand_formatted(text):
    """How many comments of a Python or C++ source keep the formatter away."""
    return len(re.findall(r"(?:#|//) *(?:fmt: *(?:skip|off)|clang-format off)", text))


def test_few_statements_are_formatted_by_hand():
    counts = {path: hand_formatted((ROOT / path).read_text(encoding="utf-8")) for path in sizes()}
    # this file has the words in its tests
    counts = {path: count for path, count in counts.items() if count and path != "tests/test_sizes.py"}
    assert counts, "the tables of instructions are formatted by hand"
    assert sum(counts.values()) <= MAX_HAND_FORMATTED, counts


def test_hand_formatting_is_recognised():
    assert hand_formatted("a = [1,2]  # fmt: skip\n# fmt: off\n// clang-format off\nb = 1  # skip\n") == 3


@pytest.mark.parametrize("length", [80, 81])
def test_a_long_function_is_measured(length):
    body = "\n".join(f"  if (x) {{ y[{i}] = '{{'; }}  // }}" for i in range(length - 3))
    before = "namespace a {\nstruct B {\n  int c = 0;\n\n"
    after = '};\n#define X {\nextern "C" void g();\n}\n'
    function = f"template <typename T>\nvoid f(T x) {{\n{body}\n}}\n"
    assert cpp_functions(before + function + after) == [("template <typename T>\nvoid f(T x)", length)]
    python = "@decorated\ndef f(x):\n" + "    x\n" * (length - 1)
    assert python_functions(python) == [("f", length)]


def test_few_files_lie_beside_the_packages():
    files = sorted(path.name for path in (ROOT / "nasfast").glob("*.py"))
    assert len(files) <= 6, f"put a new module into a package: {files}"
