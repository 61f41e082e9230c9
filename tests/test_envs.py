import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
# the ways a variable is read in Python, C++ and CMake, and by setup.py's own function
READ = re.compile(r"""(?:environ\.get\(|environ\[|getenv\(|ENV\{|switch\()["']?(NASFAST_\w+)""")


def test_envs_page_lists_exactly_the_variables_the_source_reads():
    files = [ROOT / "setup.py", ROOT / "CMakeLists.txt"]
    for folder, pattern in (("nasfast", "*.py"), ("csrc", "*.*"), ("kernels", "*.*")):
        files += (ROOT / folder).rglob(pattern)
    read = {name for file in files for name in READ.findall(file.read_text())}
    documented = set(re.findall(r"^\| `(NASFAST_\w+)`", (ROOT / "ENVS.md").read_text(), re.MULTILINE))
    assert read == documented
    assert read >= {"NASFAST_BACKEND", "NASFAST_ISA", "NASFAST_CUDA", "NASFAST_NATIVE"}
