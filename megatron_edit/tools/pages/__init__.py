"""What the HTML pages of this project share: the look, and pictures that follow it.

`base.html` is the frame that every page extends; `drawing` makes pictures as SVG that take their
colours from the page, and as PNG files; `rendering` puts a page together.
"""
