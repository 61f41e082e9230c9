from doc_links import ROOT, pages, problems


def test_every_link_and_path_of_the_documentation_exists():
    assert len(pages(ROOT)) > 5
    assert problems(ROOT) == []


def test_broken_links_and_paths_are_reported(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "guide.md").write_text("# Real heading: one\n")
    (tmp_path / "README.md").write_text(
        "[good](docs/guide.md#real-heading-one) [gone](docs/gone.md) [anchor](docs/guide.md#other)\n"
        "[site](https://a.b/c)\n"
        "`docs/guide.md` `nasfast/no_such_file.py` `csrc/*` see docs/missing.md\n"
        "```\n[in code](nowhere.md)\n```\n\nText:\n- item\n\n- good\n  item\n- other\n"
    )
    assert problems(tmp_path) == [
        "README.md: link docs/gone.md does not exist",
        "README.md: link docs/guide.md#other: guide.md has no heading #other",
        "README.md: no empty line before the list '- item'",
        "README.md: path nasfast/no_such_file.py does not exist",
        "README.md: path csrc/* does not exist",
        "README.md: path docs/missing.md does not exist",
    ]
