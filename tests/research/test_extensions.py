"""What the core knows of the research package: every entry leads to what it names."""

from nasfast import extensions
from nasfast.indicators.registry import SCORES, all_scores
from nasfast.research.studies.commands import STUDIES
from nasfast.spaces import BUILDERS, named_space


def test_every_entry_leads_to_what_it_names():
    assert all(BUILDERS[name]() == named_space(name) and named_space(name).name == name for name in extensions.SPACES)
    assert all(extensions.load(entry).KEY == key for key, entry in extensions.SPACE_KINDS.items())
    assert all_scores() is SCORES
    homes = {name: score.function.__module__ for name, score in SCORES.items()}
    assert {name: home for name, home in homes.items() if ".research." in home} == extensions.SCORES
    kinds: dict[str, list[str]] = {}
    for name in STUDIES:
        command, _, kind = name.partition(" ")
        kinds.setdefault(command, []).append(kind)
    assert set(kinds) == set(extensions.COMMANDS)
    assert all(extensions.COMMANDS[command].startswith(" | ".join(own)) for command, own in kinds.items())
