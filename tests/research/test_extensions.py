"""What the core knows of the research package: every entry leads to what it names, and nothing else is imported."""

import subprocess
import sys

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


def test_the_core_runs_without_the_research_package():
    code = """if True:
        import sys
        sys.modules["nasfast.research"] = None
        import nasfast.cli.commands, nasfast.pipeline, nasfast.stability.run
        from nasfast.settings import RunConfig
        from nasfast.supernet import build
        cfg = RunConfig.from_dict({"score": {"name": "gamma"}, "space": {"name": "digits_mini"}}).resolved()
        space = nasfast.spaces.get_space(cfg.space.name)
        build(space, [layer.options[0] for layer in space.layers])
        """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
