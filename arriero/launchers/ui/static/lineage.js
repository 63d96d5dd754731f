// From a step to what it was made of, from a rollout or prompt to what it went into, and on from there.

import { get, link, make, number, table } from "./dom.js";

const QUESTIONS = {
  step: "step", rollout: "rollout or group", prompt: "prompt", row: "row of the data", weights: "fingerprint",
};

export async function lineage(place, query) {
  const asked = Object.keys(QUESTIONS).find((key) => query.get(key));
  const options = Object.entries(QUESTIONS).map(([key, text]) => make("option", { value: key, selected: key === asked }, text));
  const kind = make("select", { id: "kind", "aria-label": "what" }, options);
  const value = make("input", { id: "value", type: "search", value: asked ? query.get(asked) : "", "aria-label": "which" });
  const form = make("form", {}, kind, " ", value, " ", make("button", {}, "ask"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    location.hash = `#lineage?${new URLSearchParams({ [kind.value]: value.value.trim() })}`;
  });
  place.append(form);
  if (!asked) {
    place.append(make("p", { class: "note" }, "which step, rollout, prompt or row?"));
    return () => {};
  }
  const found = await get("api/lineage", { [asked]: query.get(asked) });
  place.append(make("h2", { id: "about" }, found.about));
  const step = (version) => [link(version, "lineage", { step: version }), " "];
  if (found.steps.length) {
    const rows = found.steps.map((s) => [
      step(s.version), number(s.loss), number(s.grad_norm), number(s.reward), s.staleness_max, s.tokens,
      s.before.slice(0, 12), s.after.slice(0, 12), link("its rollouts", "rollouts", { step: s.version }),
    ]);
    const columns = ["step", "loss", "gradient", "reward", "staleness", "tokens", "weights before", "after", ""];
    place.append(make("h2", {}, "Steps"), table(columns, rows, { id: "steps" }));
  }
  if (found.rollouts.length) {
    const rows = found.rollouts.map((r) => [
      link(r.id, "rollouts", { id: r.id }), number(r.reward), r.outcome, r.tokens, r.versions.map(step).flat(),
      r.steps.map(step).flat(), link(r.prompt, "lineage", { prompt: r.prompt }),
    ]);
    const columns = ["rollout", "reward", "outcome", "tokens", "sampled by", "trained in", "prompt"];
    place.append(make("h2", {}, "Rollouts"), table(columns, rows, { id: "rollouts" }));
    if (found.left_out) place.append(make("p", { class: "note" }, `${found.left_out} more`));
  }
  if (found.prompts.length) {
    const rows = found.prompts.map((p) => [
      link(p.id, "lineage", { prompt: p.id }), link(p.row, "lineage", { row: p.row }), p.epoch, p.split, p.became,
    ]);
    place.append(make("h2", {}, "Prompts"), table(["prompt", "row", "epoch", "split", "became"], rows, { id: "prompts" }));
  }
  return () => {};
}
