"""Pictures, by matplotlib (the extra ``plot``): each function returns a Figure.

overlay  `overlay`: a map of places, over the image that it speaks of
figure   the Figure to draw on, and what is said where matplotlib is missing
"""

from .overlay import overlay

__all__ = ["overlay"]
