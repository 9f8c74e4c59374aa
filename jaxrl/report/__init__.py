"""A run as one page: jaxrl report RUN [RUN ...]

Reads run directories (`runs.py`), derives what a page shows (`curves.py`, `timeline.py`, `samples.py`,
`findings.py`, put together by `content.py`), and writes a single HTML file that needs neither network nor
server (`page.py`). Nothing here imports jax, and nothing is recomputed: every figure on the page is in a
file of the run.
"""

from jaxrl.report.content import content
from jaxrl.report.page import report_of, write_report

__all__ = ["content", "report_of", "write_report"]
