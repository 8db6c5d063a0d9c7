"""Words for people: names and counts made fit for one line of a log."""

import os
from collections import Counter


def printable(text, most=400):
    """`text` safe for one line of a log: control, bidi and undecodable characters escaped, cut at `most` characters."""
    text = str(text)
    short = text if len(text) <= most else text[:most] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in short)


def named(names, most=3):
    """`a.png, b.png, c.png and 7 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(printable(name) for name in names[:most]) + more


def counted(names):
    """File names to `10 .txt, 2 .heic, 1 without suffix`, most frequent first."""
    suffixes = Counter(os.path.splitext(name)[1].lower() or "without suffix" for name in names)
    ranked = sorted(suffixes.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {printable(suffix, 20)}" for suffix, count in ranked[:6]) + (", …" if ranked[6:] else "")
