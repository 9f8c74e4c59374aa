"""A run as one page: jaxrl report RUN [RUN ...]

Reads what runs left in their directories (`runs.py`), makes of it what a page shows (`curves.py`, `timeline.py`,
`samples.py`, `findings.py`, put together by `content.py`), and writes a single HTML file that needs neither network nor
server (`page.py`). Nothing here imports jax, and nothing is computed anew: a figure on the page stands in a file of the
run.
"""

from jaxrl.report.content import content
from jaxrl.report.page import report_of, write_report

__all__ = ["content", "report_of", "write_report"]
