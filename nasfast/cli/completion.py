"""The script by which a shell completes commands, flags and their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_SCRIPT = """\
# completion of nasfast; made by `nasfast completion {shell}`
{prelude}_nasfast() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} name=${{COMP_WORDS[1]}} words=
  case "$COMP_CWORD $name" in
    "1 "*) words="{commands}" ;;
{kinds}
    *)
      case "$name ${{COMP_WORDS[2]}}" in {with_kinds}) name="$name ${{COMP_WORDS[2]}}" ;; esac
      if [[ $cur == -* ]]; then
        case "$name" in
{flags}
        esac
      else
        case "$name $prev" in
{values}
        esac
      fi ;;
  esac
  # no word means the name of a file
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _nasfast nasfast
"""
_PRELUDES = {"bash": "", "zsh": "autoload -U +X bashcompinit && bashcompinit\n"}


def completion_script(shell: str, options: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """The script for a shell.

    Args:
        shell: `bash` or `zsh`.
        options: for each command, with the kind behind it where it has kinds, its flags; each flag has the values that
            it takes, or none if these are not few.
    """
    commands = list(dict.fromkeys(name.split(" ")[0] for name in options))
    kinds = {c: [name.split(" ")[1] for name in options if name.startswith(f"{c} ")] for c in commands}
    names = [name for name in options if " " in name]
    return _SCRIPT.format(
        shell=shell,
        prelude=_PRELUDES[shell],
        commands=" ".join([*commands, "--help", "--version"]),
        kinds="\n".join(f'    "2 {c}") words="{" ".join(k)} --help" ;;' for c, k in kinds.items() if k),
        with_kinds="|".join(f'"{name}"' for name in names),
        flags="\n".join(f'          "{name}") words="{" ".join(flags)}" ;;' for name, flags in options.items()),
        values="\n".join(
            f'          "{name} {flag}") words="{" ".join(values)}" ;;'
            for name, flags in options.items()
            for flag, values in flags.items()
            if values
        ),
    )
