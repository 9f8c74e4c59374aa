"""Images of data rows: forms of cells and messages (read), files to pixels (decode), sizes and patches (resize), image
tokens (expand), a bounded store of what was made (store).

Only `decode` imports Pillow, and only where an image is opened. Nothing here fetches from a network.
"""
