"""Optional features. Each registers by the entry points of pyproject.toml, as a third party's would.

The rest of embodrl imports none of them: a run loads those that its configuration or its verb names.
"""
