// Writes text with a model that scripts/export.py --format=onnx has put into model/: one call of it per token.

import * as ort from "./package/dist/ort.wasm.min.mjs";

const MARKS = [100, 1000, 10_000, 100_000]; // numbers of tokens whose time the table keeps
const WINDOW = 100; // tokens whose median time it shows: a mean would count what other programs took
const SHOWN = 3000; // characters of the text that stay on the page
const element = (id) => document.getElementById(id);

/** The model, and its state: tensors by name, zeros before the first token. */
class Model {
  static async load(folder) {
    const response = await fetch(`${folder}/model.json`);
    if (!response.ok) throw new Error(`${folder}/model.json is missing: export a model there (see this page's source)`);
    const record = await response.json();
    if (record.tokenizer !== "bytes") throw new Error(`the tokenizer is ${record.tokenizer}: this page knows bytes alone`);
    ort.env.wasm.numThreads = 1;
    const session = await ort.InferenceSession.create(`${folder}/model.onnx`);
    const model = new Model(record, session);
    for (let i = 0; i < 200; i++) await model.step(0); // until the browser has compiled what is called often
    model.forget();
    return model;
  }

  constructor(record, session) {
    this.record = record;
    this.session = session;
    this.forget();
  }

  forget() {
    this.state = {};
    for (const [name, { shape, dtype }] of Object.entries(this.record.state)) {
      const size = shape.reduce((a, b) => a * b, 1);
      const zeros = dtype === "int32" ? new Int32Array(size) : new Float32Array(size);
      this.state[name] = new ort.Tensor(dtype, zeros, [1, ...shape]);
    }
  }

  get bytes() {
    return Object.values(this.state).reduce((sum, tensor) => sum + tensor.data.byteLength, 0);
  }

  /** Read one token, and return the logits of the next. */
  async step(token) {
    const tokens = new ort.Tensor("int32", Int32Array.of(token), [1]);
    const results = await this.session.run({ tokens, ...this.state });
    for (const name in this.state) this.state[name] = results[`new.${name}`];
    return results.logits.data;
  }
}

/** Draw a token; temperature 0 takes the most likely one. */
function sample(logits, temperature) {
  const best = logits.indexOf(logits.reduce((a, b) => Math.max(a, b)));
  if (temperature === 0) return best;
  const weights = logits.map((x) => Math.exp((x - logits[best]) / temperature));
  let left = Math.random() * weights.reduce((a, b) => a + b);
  return Math.max(weights.findIndex((weight) => (left -= weight) < 0), 0);
}

/** Continue the prompt until `stopped` returns true. `report` gets every byte, and the time of every step. */
async function write(model, prompt, temperature, stopped, report) {
  model.forget();
  const end = model.record.end_of_text;
  const bytes = [...new TextEncoder().encode(prompt)];
  let token = bytes.shift() ?? end;
  let shown = performance.now();
  for (let n = 0; !stopped(); n++) {
    report.add(token === end ? 10 : token);
    const start = performance.now();
    const logits = await model.step(token);
    token = bytes.length ? bytes.shift() : sample(logits, temperature);
    report.time(n, performance.now() - start);
    if (performance.now() - shown > 100) {
      report.show();
      await new Promise((resume) => setTimeout(resume)); // lets the page draw, and see clicks
      shown = performance.now();
    }
  }
  report.show();
}

/** What the page shows of a text. */
class Report {
  constructor() {
    this.decoder = new TextDecoder();
    this.text = "";
    this.times = new Float64Array(WINDOW);
    this.count = 0;
    this.marks = new Map();
  }

  add(byte) {
    this.text = (this.text + this.decoder.decode(Uint8Array.of(byte), { stream: true })).slice(-SHOWN);
  }

  time(n, milliseconds) {
    this.times[n % WINDOW] = milliseconds;
    this.count = n + 1;
    if (MARKS.includes(this.count)) this.marks.set(this.count, this.median());
  }

  median() {
    return this.times.slice(0, this.count).sort()[Math.min(this.count, WINDOW) >> 1];
  }

  show() {
    element("text").textContent = this.text;
    element("text").scrollTop = element("text").scrollHeight;
    const rows = [...this.marks, [`now: ${this.count.toLocaleString("en")}`, this.median()]];
    const cells = ([n, milliseconds]) => `<tr><td>${n.toLocaleString("en")}</td><td>${milliseconds.toFixed(1)}</td></tr>`;
    element("times").innerHTML = rows.map(cells).join("");
  }
}

async function main() {
  const model = await Model.load("model");
  const { config, step } = model.record;
  const size = (model.bytes / 1000).toLocaleString("en", { maximumFractionDigits: 0 });
  element("about").textContent =
    `${config.n_layers} layer${config.n_layers === 1 ? "" : "s"} of linear attention with exponential features, trained for ` +
    `${step.toLocaleString("en")} steps, byte by byte. ` +
    `The state is all it remembers: ${size} kB, however long the text.`;
  let stopped = true;
  const setStopped = (value) => {
    stopped = value;
    element("write").disabled = !value;
    element("stop").disabled = value;
  };
  element("stop").onclick = () => (stopped = true);
  element("write").onclick = async () => {
    setStopped(false);
    try {
      await write(model, element("prompt").value, Number(element("temperature").value), () => stopped, new Report());
    } catch (error) {
      element("about").textContent = error.message;
    }
    setStopped(true);
  };
  setStopped(true);
}

main().catch((error) => (element("about").textContent = error.message));
