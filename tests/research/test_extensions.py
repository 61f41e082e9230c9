"""What the core knows of the research package: every entry leads to what it names."""

from nasfast import extensions
from nasfast.indicators.registry import SCORES, all_scores
from nasfast.research.studies import registry
from nasfast.spaces import BUILDERS, named_space


def test_every_entry_leads_to_what_it_names():
    assert all(BUILDERS[name]() == named_space(name) and named_space(name).name == name for name in extensions.SPACES)
    assert all(extensions.load(entry).KEY == key for key, entry in extensions.SPACE_KINDS.items())
    assert all_scores() is SCORES
    homes = {name: score.function.__module__ for name, score in SCORES.items()}
    assert {name: home for name, home in homes.items() if ".research." in home} == extensions.SCORES
    for command, studies in registry.COMMANDS.items():
        assert extensions.COMMANDS[command].startswith(" | ".join(study.kind for study in studies))
    assert set(extensions.COMMANDS) == set(registry.COMMANDS)
