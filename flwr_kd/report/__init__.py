"""The report of results: one HTML file that needs no network and no other file.

:func:`flwr_kd.report.page.write` writes it. Texts of a result file are untrusted. :mod:`flwr_kd.report.html`
escapes every text that becomes a part of the page, and the page's policy runs no script but its own.
"""
