"""Tables on a terminal whose reader may leave early, and whose encoding may lack letters."""

from typing import Any

from rich.console import Console
from rich.text import Text

from svb_jax.experiments.terminal import spell


class PlainConsole(Console):
    """Rich's console, with tables that stay aligned in ASCII and an end without an error at ``| head``."""

    def on_broken_pipe(self) -> None:
        """Leave it to the command line: rich would end the process as failed."""
        raise BrokenPipeError

    def render_str(self, text: str, **options: Any) -> Text:
        """Spell what cannot be shown before columns are measured, not after."""
        try:
            text.encode(self.encoding)
        except UnicodeEncodeError:
            text = spell(text)
        return super().render_str(text, **options)
