"""Reward functions of rows with images, in a file of their own: a worker imports it, and not what a test needs."""


def brightness(completion, images, scale=1.0):
    """Of the images of a row; of none 0."""
    return scale * sum(float(one.pixels.mean()) for one in images) + 1000 * len(images)


def widths(completions, image_sizes):
    return [float(sum(one.stored[1] * 1000 + one.seen[1] for one in sizes)) for sizes in image_sizes]


def blind(completion):
    return 1.0
