"""A model that answers a page: type a text, and every head is computed again by Python.

`headwise serve` shows the page in a browser, `headwise.live` in a notebook. Both use the page of
`Heads.to_html`, one protocol (protocol.py) and one `LiveModel`.
"""
