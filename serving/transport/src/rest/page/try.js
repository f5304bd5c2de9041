// The form that tries a model: inputs by their shape and type, the answer, or the error as the server said it.
"use strict";

// Elements up to which an input is written out to be edited; larger ones are made when they are sent.
const SHOWN_MAX = 1024;
const ELEMENTS_MAX = 1000000;
// Rows and elements of an output that are shown.
const ROWS_MAX = 50;
const COLUMNS_MAX = 32;

const FLOATS = ["FP16", "BF16", "FP32", "FP64"];

// What fills an input of a type, as JSON text of one element.
const FILLS = {
  random: (datatype) => {
    if (FLOATS.includes(datatype)) return (Math.random() * 2 - 1).toFixed(3);
    if (datatype === "BOOL") return String(Math.random() < 0.5);
    if (datatype === "BYTES") return JSON.stringify(`text ${Math.floor(Math.random() * 100)}`);
    return String(Math.floor(Math.random() * 100));
  },
  zeros: (datatype) => ({ BOOL: "false", BYTES: '""' })[datatype] ?? (FLOATS.includes(datatype) ? "0.0" : "0"),
};

const elements = (shape) => shape.reduce((product, extent) => product * extent, 1);

// Nested lists of a shape, one line for each entry of the first.
function nested(shape, one, depth = 0) {
  if (depth === shape.length) return one();
  const items = Array.from({ length: shape[depth] }, () => nested(shape, one, depth + 1));
  return `[${items.join(depth === 0 && shape.length > 1 ? ",\n " : ", ")}]`;
}

// The fields of one input; `read` gives it as JSON text.
function inputField(tensor, at) {
  const id = (what) => `input-${at}-${what}`;
  const extents = [];
  const dimensions = tensor.shape.map((extent, axis) => {
    if (extent >= 0) return undefined;
    const field = element("input", { type: "number", id: id(axis), min: "0", max: String(ELEMENTS_MAX), step: "1", value: "1", required: true });
    field.addEventListener("input", refill);
    extents[axis] = field;
    return element("label", { for: id(axis) }, axis === 0 ? "Extent 1 (rows)" : `Extent ${axis + 1}`, field);
  });
  const choice = element("select", { id: id("fill"), onchange: refill },
    element("option", { value: "random" }, "random values"), element("option", { value: "zeros" }, "zeros"),
    element("option", { value: "own" }, "as written below"));
  const text = element("textarea", { id: id("values"), spellcheck: "false", "aria-label": `Values of ${tensor.name}`,
    oninput: () => { choice.value = "own"; } });
  const note = element("p", { class: "quiet" });
  const shape = () => tensor.shape.map((extent, axis) => (extent >= 0 ? extent : Number(extents[axis].value)));
  const fill = (extents) => nested(extents.length ? extents : [1], () => FILLS[choice.value](tensor.datatype));

  // Own values stay as they are, whatever the shape becomes: the server says when they do not fit.
  function refill() {
    const count = elements(shape());
    const shown = choice.value === "own" || count <= SHOWN_MAX;
    text.hidden = !shown;
    note.textContent = shown ? "" : `${count.toLocaleString("en")} values are made when it is sent.`;
    if (choice.value !== "own" && shown) text.value = fill(shape());
  }

  function read() {
    const count = elements(shape());
    let data = text.value.trim();
    if (choice.value !== "own" && text.hidden) {
      if (count > ELEMENTS_MAX) {
        throw new Error(`${tensor.name}: ${count.toLocaleString("en")} values are more than this page makes (${ELEMENTS_MAX.toLocaleString("en")})`);
      }
      data = fill(shape());
    }
    try {
      if (!Array.isArray(JSON.parse(data))) throw new Error("a list is expected, such as [1, 2, 3]");
    } catch (error) {
      throw new Error(`${tensor.name}: the values are no JSON list: ${error.message}`);
    }
    const head = JSON.stringify({ name: tensor.name, shape: shape(), datatype: tensor.datatype });
    // The text goes as it was written: through numbers of this language large integers would change.
    return `${head.slice(0, -1)},"data":${data}}`;
  }

  refill();
  const field = element("fieldset", {},
    element("legend", {}, element("span", { class: "name" }, tensor.name), " ",
      element("span", { class: "quiet" }, `${tensor.datatype} `, element("span", { class: "mono" }, shapeOf(tensor.shape)))),
    element("div", { class: "fields" }, dimensions, element("label", { for: id("fill") }, "Values", choice)), text, note);
  return { field, read };
}

function tryCard(entry, metadata) {
  const inputs = metadata.inputs.map(inputField);
  const result = element("div", { class: "result", "aria-live": "polite" });
  const button = element("button", { class: "main", id: "run" }, "Run the model");
  const form = element("form", { id: "try", novalidate: true }, inputs.map((input) => input.field), button, result);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const path = `${pathOf(entry.name, entry.version)}/infer`;
    button.disabled = true;
    try {
      const body = `{"inputs":[${inputs.map((input) => input.read()).join(",")}]}`;
      const begun = performance.now();
      const answer = await call(path, body);
      result.replaceChildren(...answerOf(answer, performance.now() - begun), command(path, body));
    } catch (refused) {
      result.replaceChildren(notice(refused.status ? `${refused.status}: ${refused.message}` : refused.message));
    } finally {
      button.disabled = false;
    }
  });
  return card("Try it", form);
}

function answerOf(answer, milliseconds) {
  const said = element("p", { class: "quiet" },
    `Answered by version ${answer.model_version} in ${time(milliseconds * 1e6).join(" ")}, there and back.`);
  return [said, ...answer.outputs.map(outputOf)];
}

// An output as a table, a line for each row, with the largest of a row of floats marked.
function outputOf(output) {
  const data = output.data ?? [];
  const rows = output.shape.length > 1 ? output.shape[0] : 1;
  const width = rows > 0 ? data.length / rows : 0;
  const shown = Math.min(rows, ROWS_MAX);
  const scored = FLOATS.includes(output.datatype) && output.shape.length === 2 && width > 1;
  const cell = (value) => (typeof value === "number" && !Number.isInteger(value) ? String(Number(value.toPrecision(6))) : String(value));
  const lines = Array.from({ length: shown }, (_, row) => {
    const values = data.slice(row * width, row * width + Math.min(width, COLUMNS_MAX));
    const all = scored ? data.slice(row * width, (row + 1) * width) : [];
    const best = scored ? all.reduce((best, value, at) => (value > all[best] ? at : best), 0) : -1;
    const cells = values.map((value, at) => element("td", { class: at === best ? "number mono best" : "number mono" }, cell(value)));
    return scored ? [String(best), ...cells] : cells;
  });
  const columns = Array.from({ length: Math.min(width, COLUMNS_MAX) }, (_, at) => String(at));
  const caption = `${output.name}: ${output.datatype} ${shapeOf(output.shape)}`;
  const left = [];
  if (rows > shown) left.push(`${(rows - shown).toLocaleString("en")} more rows`);
  if (width > COLUMNS_MAX) left.push(`${(width - COLUMNS_MAX).toLocaleString("en")} more values in each`);
  const rest = left.length ? [element("p", { class: "quiet" }, `${left.join(", ")} are not shown.`)] : [];
  return element("div", { class: scored ? "output scored" : "output" }, table(caption, scored ? ["largest", ...columns] : columns, lines), ...rest);
}

// The same request for a shell.
function command(path, body) {
  const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
  const long = body.length > 4000;
  const data = long ? "'{\"inputs\": …}'" : quoted(body.replaceAll("\n", ""));
  return element("details", {}, element("summary", {}, "The same with curl"),
    element("pre", {}, `curl ${quoted(new URL(path, location.href).href)} -H 'content-type: application/json' -d ${data}`));
}
