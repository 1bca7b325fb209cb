"""The page itself: Gradio components over the functions of this folder and of `pictures.py`."""

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # before gradio is imported: nothing is sent

import gradio as gr

from recurrent_gpt2 import available_exit_policies

from ..pictures import SCRIPT, STYLE
from .generation import Text
from .page import Page
from .workbench import AS_JSON, OWN, Field, Opened, Workbench, fields_of, policy_choices, read_loops, read_policy

PROGRAMS = {
    "programs": [
        "x0 = 3\nx1 = 5\nx2 = 4\nx3 = x0 + x1\nx4 = x3 - x2\nx5 = x2 + x2\nx6 = x4 + x3\nx7 = x6 - x5\nx8 = x1 + x0\n"
        "x9 = x7 + x6\nx10 = x9 - x8\nx11 = x10 + x9\n? x11 x5",
        "x0 = 1\nx1 = x0 + x0\nx2 = x1 + x1\nx3 = x2 + x2\nx4 = x3 + x3\nx5 = x4 + x4\n",
        "x0 = 6\nx1 = 2\nx2 = 5\nx3 = 1\nx4 = x0 + x1\nx5 = x2 - x3\nx6 = x4 + x5\n",
    ],
    "chains": ["a c @0 @1 @2 @4 @5 b @6 @8 @7 @10 @9", "d @0 @1 @2 @3 @4 @5 @6 @7 @8"],
}
HOW_TO_TYPE = "Arithmetic is modulo 7, and ? asks for values. Chains: letters, and @ with the number of a slot."
PROMPTS = ["Return the number of", "The first argument is a", "If the file does not exist,"]
PASTED = (
    "The function returns a list of the names of the entries in the directory given by path. The list is in arbitrary "
    "order, and does not include the special entries even if they are present in the directory."
)
# Everything that runs a model, one after the other: sampling draws from a generator that is shared.
ONE_AT_A_TIME = {"concurrency_id": "model", "concurrency_limit": 1}
CLICK = """
const choose = (target) => {
  const token = target.closest("[data-token]");
  if (token) trigger("select", { index: Number(token.dataset.token) });
};
element.addEventListener("click", (event) => choose(event.target));
element.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(event.target); });
"""


class PolicyForm:
    """The fields of a policy and of the loops: one group of fields for each registered policy, one of which shows."""

    def __init__(self):
        self.policy = gr.Dropdown(policy_choices(), value=OWN, label="Exit policy", filterable=False)
        self.fields: list[tuple[str, Field]] = []
        self.inputs: list[Any] = [self.policy]
        groups = {}
        for name in available_exit_policies():
            if not fields_of(name):
                continue
            with gr.Group(visible=False) as groups[name]:
                for field in fields_of(name):
                    self.fields.append((name, field))
                    self.inputs.append(self._component(field))
        with gr.Group(visible=False) as groups[AS_JSON]:
            self.inputs.append(
                gr.Textbox(
                    '{"name": "step_norm", "normalize": "state", "threshold": 0.2}', lines=2, label="Exit policy",
                    info="What `exit_policy=` takes: a policy, or a list with one per group.",
                )
            )  # fmt: skip
        self.inputs.append(
            gr.Textbox(label="Most loops", info="One number, or one per group: 4 12 4. Empty: the checkpoint's.")
        )
        self.policy.change(
            lambda chosen: [gr.update(visible=name == chosen) for name in groups], self.policy, list(groups.values()),
            show_progress="hidden", api_visibility="private",
        )  # fmt: skip

    def _component(self, field: Field) -> gr.components.Component:
        if field.kind == "switch":
            return gr.Checkbox(bool(field.default), label=field.name)
        if field.kind == "choice":
            return gr.Dropdown(list(field.choices), value=field.default, label=field.name, filterable=False)
        if field.kind in ("number", "count"):
            info = "Empty: the rule's default." if field.default is None else None
            return gr.Number(field.default, label=field.name, info=info, precision=0 if field.kind == "count" else None)
        info = 'JSON, such as [{"name": "kl"}, {"name": "cosine"}]' if field.kind == "json" else None
        return gr.Textbox(field.default or "", label=field.name, info=info)

    def read(self, opened: Opened, values: tuple[Any, ...]) -> dict[str, Any]:
        """`exit_policy` and `num_loops`, from the values of `inputs`."""
        chosen, *of_fields, as_json, loops = values
        named = zip(self.fields, of_fields, strict=True)
        settings = {field.name: value for (name, field), value in named if name == chosen}
        return read_loops(opened, read_policy(chosen, settings, as_json), loops)


def build(workbench: Workbench) -> gr.Blocks:
    """The page, for `launch`."""
    page = Page(workbench)
    with gr.Blocks(title="Watch a model think", analytics_enabled=False) as blocks:
        gr.Markdown(
            "# Watch a model think\nA looped model runs some of its layers again and again, and every token leaves the "
            "loop when it is done. Easy tokens leave early; hard ones stay."
        )
        with gr.Tab("Steps against difficulty"):
            _difficulty_tab(page)
        with gr.Tab("Generate"):
            _generate_tab(page)
        with gr.Tab("Policies"):
            _compare_tab(page)
    return blocks


def _checkpoint(names: list[str], value: str) -> gr.Dropdown:
    return gr.Dropdown(
        names, value=value, allow_custom_value=True, label="Checkpoint", info="Or owner/name of one on the Hub."
    )


def _difficulty_tab(page: Page) -> None:
    names = page.workbench.with_tasks
    if not names:
        gr.Markdown("None of these checkpoints was trained on a depth task: docs/tasks.md says how to train one.")
        return
    first = names[-1]
    examples = [[name, text] for name in reversed(names) for task in page.workbench.open(name).tasks
                for text in PROGRAMS.get(task.name, [])]  # fmt: skip
    start = examples[0][1] if examples else ""
    gr.Markdown(
        "Each line is a token that must find its value. A value can be known one loop after the values that it is made "
        "of: watch them light up level by level, and lines leave the loop when they are done."
    )
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            checkpoint = _checkpoint(names, first)
            text = gr.Textbox(start, lines=8, max_lines=20, label="Program", info=HOW_TO_TYPE)
            button = gr.Button("Answer", variant="primary")
            with gr.Accordion("Exit policy and loops", open=False):
                form = PolicyForm()
        with gr.Column(scale=5, min_width=320, elem_classes="lv-picture-first"):
            answers = gr.HTML(
                page.answer(first, start) if start else "",
                apply_default_css=False,
                js_on_load=SCRIPT,
                elem_id="answers",
                label="Answers",
            )
    run = {
        "fn": lambda name, text, *values: page.answer(name, text, lambda opened: form.read(opened, values)),
        "inputs": [checkpoint, text, *form.inputs], "outputs": answers, **ONE_AT_A_TIME,
    }  # fmt: skip
    gr.on([button.click, text.submit], **run, api_name="answer")
    if examples:
        shown = gr.Examples(examples, [checkpoint, text], label="Examples: click one", elem_id="programs")
        shown.load_input_event.then(**run, api_visibility="private")


def _generate_tab(page: Page) -> None:
    first = page.workbench.names[0]
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            checkpoint = _checkpoint(page.workbench.names, first)
            prompt = gr.Textbox(PROMPTS[0], lines=3, max_lines=12, label="Prompt")
            new_tokens = gr.Slider(0, 200, 40, step=1, label="New tokens", info="0: only look at the prompt")
            button = gr.Button("Generate", variant="primary")
            form = PolicyForm()
            with gr.Accordion("Fixed depth beside it, and sampling", open=False):
                fixed = gr.Number(None, label="Fixed loops", precision=0, info="Empty: as many as the most loops.")
                temperature = gr.Number(0.0, label="Temperature", info="0: always the likeliest token.")
                top_p = gr.Number(1.0, label="Top-p")
                seed = gr.Number(0, label="Seed", precision=0)
        with gr.Column(scale=5, min_width=320):
            with gr.Row():
                panels = []
                for title, name in (("With the exit policy", "policy"), ("At fixed depth", "fixed")):
                    with gr.Column(min_width=280):
                        gr.Markdown(f"### {title}")
                        panels.append((
                            gr.HTML(apply_default_css=False, js_on_load=CLICK, elem_id=f"text-{name}", min_height=60),
                            gr.HTML(apply_default_css=False, elem_id=f"numbers-{name}"),
                            gr.State(),
                        ))  # fmt: skip
            gr.Markdown("Colours are loops spent on predicting a token. **Click a token** to see how it came about.")
            reading = gr.Radio(
                ["leave", "head"], value="leave", label="Lens", info="leave: the token leaves the loop there, and "
                "the layers behind it run; head: the head reads the state as it is.",
            )  # fmt: skip
            view = gr.HTML(apply_default_css=False, js_on_load=SCRIPT, elem_id="token-view")
    chosen = gr.State()  # the text and the place that were clicked last
    outputs = [component for panel in panels for component in panel]
    sampling = ("new_tokens", "temperature", "top_p", "seed")

    def generate(name: str, prompt: str, fixed: Any, *values: Any) -> Iterator[tuple]:
        of_sampling, of_form = values[:4], values[4:]
        yield from page.generate(
            name,
            prompt,
            lambda opened: form.read(opened, of_form),
            fixed,
            dict(zip(sampling, of_sampling, strict=True)),
        )

    run = {
        "fn": generate, "outputs": outputs, "show_progress": "minimal", **ONE_AT_A_TIME,
        "inputs": [checkpoint, prompt, fixed, new_tokens, temperature, top_p, seed, *form.inputs],
    }  # fmt: skip
    gr.on([button.click, prompt.submit], **run, api_name="generate")
    shown = gr.Examples(
        [[first, text] for text in PROMPTS], [checkpoint, prompt], label="Examples: click one", elem_id="prompts"
    )
    shown.load_input_event.then(**run, api_visibility="private")

    def look(text: Text | None, reading: str, event: gr.EventData) -> tuple[str, Any]:
        place = event.index if isinstance(event.index, int) else 0
        return page.look(text, place, reading), (text, place)

    for html, _, state in panels:
        html.select(look, [state, reading], [view, chosen], **ONE_AT_A_TIME, api_visibility="private")

    def look_again(chosen: tuple[Text, int] | None, reading: str) -> Any:
        return gr.skip() if chosen is None else page.look(*chosen, reading)

    reading.change(look_again, [chosen, reading], view, **ONE_AT_A_TIME, api_visibility="private")


def _compare_tab(page: Page) -> None:
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            checkpoint = _checkpoint(page.workbench.names, page.workbench.names[0])
            text = gr.Textbox(PASTED, lines=8, max_lines=20, label="Text")
            button = gr.Button("Compare", variant="primary")
        with gr.Column(scale=5, min_width=320):
            result = gr.HTML(apply_default_css=False, elem_id="compared", min_height=60)
    button.click(page.compare, [checkpoint, text], result, **ONE_AT_A_TIME, show_progress="minimal", api_name="compare")


def theme() -> gr.themes.Base:
    """Fonts of the visitor's own system: none are fetched."""
    return gr.themes.Default(
        primary_hue="blue", font=("system-ui", "sans-serif"), font_mono=("ui-monospace", "monospace")
    )


def launch(workbench: Workbench, **arguments: Any) -> Any:
    """Serves the page; `arguments` are Gradio's."""
    settings = {"theme": theme(), "css": STYLE, "footer_links": ["settings"], "ssr_mode": False, "max_file_size": 1}
    return build(workbench).launch(**{**settings, **arguments})
