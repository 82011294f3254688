"""What does attnlens do with a model? Each command is one function here: model → Report."""

from attnlens.run.doctor import doctor, sound
from attnlens.run.inspect import Interrupted, inspect

__all__ = ["Interrupted", "doctor", "inspect", "sound"]
