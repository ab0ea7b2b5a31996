"""One self-contained HTML page, nothing fetched from elsewhere, for light and dark screens."""

import html

STYLE = """
:root { color-scheme: light dark; --back: #fbfbfa; --card: #ffffff; --ink: #1d1f23; --soft: #5c626d;
  --line: #e3e4e8; --mark: #2f6fd6; --stripe: #f5f6f8; }
@media (prefers-color-scheme: dark) { :root { --back: #14161a; --card: #1c1f25; --ink: #e7e9ee;
  --soft: #a0a7b4; --line: #30353e; --mark: #7fb0ff; --stripe: #21252c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 40px 24px 80px; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 8px; letter-spacing: -0.02em; }
h2 { font-size: 1.35rem; margin: 56px 0 4px; padding-top: 24px; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 28px 0 8px; }
p { margin: 6px 0; } p.soft, figcaption, li { color: var(--soft); font-size: 0.9rem; }
a { color: var(--mark); text-decoration: none; } a:hover { text-decoration: underline; }
nav { display: flex; flex-wrap: wrap; gap: 8px 18px; margin: 16px 0 0; }
.cards { display: grid; gap: 14px; margin: 28px 0 0;
  grid-template-columns: repeat(auto-fit, minmax(235px, 1fr)); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 16px 18px; }
.card .big { font-size: 1.7rem; font-weight: 650; letter-spacing: -0.02em;
  font-variant-numeric: tabular-nums; }
.card .what { color: var(--soft); font-size: 0.85rem; line-height: 1.4; }
.tag { display: inline-block; border: 1px solid var(--line); border-radius: 99px; padding: 1px 10px;
  margin-left: 8px; font-size: 0.75rem; font-weight: 500; color: var(--soft); vertical-align: middle; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  margin: 10px 0; }
table { border-collapse: collapse; width: 100%; font-size: 0.82rem; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; color: var(--soft); vertical-align: bottom; }
td { text-align: right; } th:first-child, td:first-child { text-align: left; white-space: nowrap; }
th, td { padding: 8px 9px; border-bottom: 1px solid var(--line); }
tbody tr:last-child td { border-bottom: 0; } tbody tr:nth-child(even) { background: var(--stripe); }
code { font: 0.85em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
figure { margin: 18px 0; padding: 14px 16px 10px; background: var(--card); border: 1px solid var(--line);
  border-radius: 12px; color: var(--ink); overflow-x: auto; }
figure svg { display: block; max-width: 100%; height: auto; margin: 0 auto; }
figcaption { margin-top: 6px; }
@media (max-width: 700px) { main { padding: 24px 14px 48px; } figure { padding: 8px; }
  td { white-space: nowrap; } }
"""


def page(title: str, body: str) -> str:
    """A whole page around its body."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def card(big: str, what: str) -> str:
    """A number that matters, and what it is."""
    number, words = html.escape(big), html.escape(what)
    return f'<div class="card"><div class="big">{number}</div><div class="what">{words}</div></div>'


def figure(svg: str, caption: str) -> str:
    """A drawing with its caption."""
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"
