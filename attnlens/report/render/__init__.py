"""Renderers of sections: terminal, markdown, HTML page, spreadsheet and pictures."""
