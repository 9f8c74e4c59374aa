"""Draws the pictures of the built-in environments, as PNG files. Standard library only."""

from __future__ import annotations

from collections.abc import Callable

from jaxrl.envs.pictures import png_of

SIDE = 8  # pixels per side of a cell
Colour = tuple[int, int, int]
RED, GREEN, BLUE = (210, 60, 50), (60, 170, 70), (60, 90, 210)
DARK, BROWN, YELLOW, GREY, ICE = (25, 35, 70), (150, 95, 50), (240, 200, 60), (90, 90, 90), (205, 225, 240)
COLOURS = {"red": RED, "green": GREEN, "blue": BLUE}
Shape = Callable[[float, float, float], bool]
SHAPES: dict[str, Shape] = {  # name -> (x, y from the centre, half the size) -> whether a point lies inside
    "circle": lambda x, y, half: x * x + y * y <= half * half,
    "square": lambda x, y, half: abs(x) <= 0.86 * half and abs(y) <= 0.86 * half,
    "triangle": lambda x, y, half: abs(x) <= (y + half) * 0.58 and y <= 0.9 * half,
    "ring": lambda x, y, half: 0.35 * half * half <= x * x + y * y <= half * half,
    "cross": lambda x, y, half: max(abs(x), abs(y)) <= half and abs(abs(x) - abs(y)) <= 0.6,
}
# cell of a map -> what is drawn there: shape, colour, half its size
THINGS: dict[str, list[tuple[str, Colour, float]]] = {
    ".": [], "#": [("square", GREY, 4.7)], "O": [("circle", DARK, 3.7)], "G": [("square", GREEN, 3.4)],
    "B": [("square", BROWN, 3.4)], "T": [("ring", YELLOW, 3.6)], "P": [("circle", RED, 2.8)],
    "*": [("ring", YELLOW, 4.0), ("square", BROWN, 2.4)], "+": [("ring", YELLOW, 4.0), ("circle", RED, 1.9)],
    "W": [("square", GREEN, 4.0), ("circle", RED, 2.3)], "X": [("circle", DARK, 3.7), ("circle", RED, 1.6)],
}


class Canvas:
    """A picture to draw on, RGB, in one colour at first. height, width: in pixels.

    ground: its colour, (red, green, blue) in 0..255."""

    def __init__(self, height: int, width: int, ground: Colour):
        self.height, self.width, self.pixels = height, width, bytearray(bytes(ground) * (height * width))

    def draw(self, shape: str, x: float, y: float, half: float, colour: Colour) -> None:
        """Draws a shape of SHAPES in place; what lies outside the picture is cut off.

        x, y: its centre in pixels, from the left and from the top. half: half its size in pixels. colour: (red, green,
        blue) in 0..255."""
        inside, reach = SHAPES[shape], int(half) + 2
        for row in range(max(0, int(y) - reach), min(self.height, int(y) + reach)):
            for column in range(max(0, int(x) - reach), min(self.width, int(x) + reach)):
                if inside(column + 0.5 - x, row + 0.5 - y, half):
                    at = 3 * (row * self.width + column)
                    self.pixels[at:at + 3] = bytes(colour)

    def file(self) -> bytes:
        """Returns the picture as a PNG file."""
        return png_of(bytes(self.pixels), self.height, self.width, 3)


def draw_map(grid: str) -> bytes:
    """Returns a map of environment `lake`, lines of cells, as a PNG file of SIDE x SIDE pixels per cell."""
    lines = grid.split("\n")
    canvas = Canvas(SIDE * len(lines), SIDE * max(map(len, lines)), ICE)
    for row, line in enumerate(lines):
        for column, cell in enumerate(line):
            for shape, colour, half in THINGS[cell]:
                canvas.draw(shape, SIDE * (column + 0.5), SIDE * (row + 0.5), half, colour)
    return canvas.file()


def draw_scene(scene: list, side: int, ground: int, clicks=()) -> bytes:
    """Returns shapes on a grey ground, and crosses where somebody clicked, as a PNG file.

    Args:
      scene: [x, y, half, colour, shape] of each, in pixels, with names of COLOURS and SHAPES. side: of the picture, in
        pixels. ground: its grey, 0..255.
      clicks: (x, y) in pixels.
    """
    canvas = Canvas(side, side, (ground, ground, ground))
    for x, y, half, colour, shape in scene:
        canvas.draw(shape, x, y, half, COLOURS[colour])
    for x, y in clicks:
        canvas.draw("cross", x, y, 2.5, (0, 0, 0))
    return canvas.file()
