"""Output on terminals that cannot show every character: ε becomes eps instead of an error."""

import codecs
import sys
import unicodedata
from typing import TextIO

SPELLED = {
    "ε": "eps",
    "σ": "sigma",
    "γ": "gamma",
    "α": "alpha",
    "±": "+/-",
    "×": "x",
    "·": "*",
    "−": "-",
    "–": "-",
    "—": "-",
    "…": "...",
    "→": "->",
    "≤": "<=",
    "≥": ">=",
    "√": "sqrt",
    "∞": "inf",
    "‖": "|",
    "•": "*",
    "ᵀ": "'",
}


def spell(text: str) -> str:
    r"""Return text in ASCII.

    Example:
      >>> spell("ε̃ = 0.5 ± 0.1, 3 × 3 │ año")
      'eps = 0.5 +/- 0.1, 3 x 3 | a\\xf1o'
    """
    # The one letter that is written as two characters.
    return "".join(map(_spell_character, text.replace("ε̃", "ε")))


def make_printable(*streams: TextIO) -> None:
    """Let streams spell what their encoding has no character for."""
    codecs.register_error("svb_jax.spell", _spell_unencodable)
    for stream in streams or (sys.stdout, sys.stderr):
        # What stands in for a terminal, as in a notebook or a test, may have no encoding to change.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="svb_jax.spell")


def _spell_unencodable(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return spell(error.object[error.start : error.end]), error.end


def _spell_character(character: str) -> str:
    if character.isascii():
        return character
    if character in SPELLED:
        return SPELLED[character]
    name = unicodedata.name(character, "")
    if name.startswith("BOX DRAWINGS"):
        return {"HORIZONTAL": "-", "VERTICAL": "|"}.get(name.split()[-1], "+")
    alike = unicodedata.normalize("NFKD", character)
    # A letter without its accent would name another file.
    return alike if alike.isascii() else character.encode("ascii", "backslashreplace").decode()
