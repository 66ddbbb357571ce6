"use strict";
/* The chooser of a guide's page: it looks answers up in the page's own JSON, computes none, and writes text only as text. */
(() => {
  const { fields, values, places } = JSON.parse(document.getElementById("chooser-data").textContent);
  const at = (id) => document.getElementById(id);
  const chosen = { model: null, gpu: null, gpus: null, basis: null, length: null };
  const NAMES = Object.keys(chosen);
  const grouped = new Intl.NumberFormat("en");

  const element = (name, text, attributes = {}) => {
    const made = document.createElement(name);
    if (text !== null) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };

  /* `code` in our own sentences. */
  const marked = (name, text, attributes) => {
    const made = element(name, null, attributes);
    made.append(...text.split("`").map((part, index) => (index % 2 ? element("code", part) : document.createTextNode(part))));
    return made;
  };

  const fill = (select, options, selected) => {
    select.replaceChildren(...options.map(([value, text]) => {
      const option = element("option", text, { value });
      option.selected = String(value) === String(selected);
      return option;
    }));
  };

  /* Each choice offers what the ones before it leave, first what the tables answer. What was chosen stays where it can: a length as
     the next longer one that the tables say fits, else as the longest of those. Until one is chosen, a page's own. */
  const choose = () => {
    let left = places;
    for (const name of NAMES.slice(0, 4)) {
      const offered = [...new Set(left.map((place) => place[name]))];
      if (!offered.includes(chosen[name])) chosen[name] = (left.find((place) => place.opens !== null) || left[0])[name];
      fill(at(`choose-${name}`), offered.map((value) => [value, String(value)]), chosen[name]);
      left = left.filter((place) => place[name] === chosen[name]);
    }
    at("choice-basis").hidden = new Set(places.map((place) => place.basis)).size === 1;
    const { answers, opens, longest } = left[0];
    const wanted = chosen.length === null ? opens : chosen.length;
    const answer = answers.find(({ length }) => length === wanted)
      || answers.find(({ length }) => length >= wanted && length <= longest)
      || answers.find(({ length }) => length === longest)
      || answers[0];
    fill(at("choose-length"), answers.map(({ length }) => [length, grouped.format(length)]), answer.length);
    show(answer);
  };

  /* As a JSON document of `recommend` has it, but for the candidates. */
  const found = (answer) => {
    const facts = Object.fromEntries(fields.map((name, index) => [name, values[answer.fields[index]]]));
    const [cell, rest] = answer.chosen === null ? [] : answer.chosen.map((index) => values[index]);
    return { ...facts, chosen: answer.chosen === null ? null : { cell, ...rest } };
  };

  const tableOf = ([title, columns, rows, , leftColumns]) => {
    const region = element("div", null, { class: "scroll", role: "region", tabindex: "0", "aria-label": values[title] });
    const table = element("table", null, { class: columns.length ? "wide" : "facts" });
    table.append(element("caption", values[title]));
    if (columns.length) {
      const head = element("tr", null);
      head.append(...columns.map((column) => element("th", values[column] || "\u00a0", { scope: "col" })));
      const thead = element("thead", null);
      thead.append(head);
      table.append(thead);
    }
    const body = element("tbody", null);
    for (const row of rows) {
      const line = element("tr", null);
      line.append(...row.map((entry, index) => index
        ? marked("td", values[entry], index < leftColumns ? {} : { class: "figure" })
        : element("th", values[entry], { scope: "row" })));
      body.append(line);
    }
    table.append(body);
    region.append(table);
    return region;
  };

  let configurations = new Map();

  const show = (answer) => {
    const facts = found(answer);
    const said = facts.chosen === null
      ? "Nothing that is known fits."
      : `${values[answer.label]}: ${facts.chosen.source}${facts.chosen.is_memory_only ? ", memory-only" : ""}`;
    at("answer-said").textContent = said;
    const entries = answer.entries.map((index) => values[index]);
    at("answer-entries").textContent = entries.length ? `In the tables of this guide: ${entries.join("; ")}.` : "";
    at("answer-tables").replaceChildren(...answer.tables.map(tableOf));
    const notes = [...facts.notes, ...answer.tables.flatMap((table) => table[3].map((index) => values[index]))];
    at("answer-notes").replaceChildren(...notes.map((note) => marked("li", note)));
    configurations = new Map(answer.configurations.map(([name, lines]) => [values[name], lines.map((line) => values[line]).join("\n")]));
    at("answer-configuration").hidden = configurations.size === 0;
    const select = at("choose-configuration");
    const kept = configurations.has(select.value) ? select.value : configurations.keys().next().value;
    fill(select, [...configurations.keys()].map((name) => [name, name]), kept);
    showConfiguration();
    at("command").textContent = values[answer.command];
    at("answer-again").hidden = values[answer.command] === "";
    const shown = JSON.stringify(facts, null, 2).replace(/[^\x20-\x7e\n]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
    at("answer-json").textContent = shown;
    at("copied-command").textContent = "";
  };

  const showConfiguration = () => {
    at("configuration").textContent = configurations.get(at("choose-configuration").value) || "";
    at("copied-configuration").textContent = "";
  };

  /* Where the clipboard is closed to pages, the text is selected, to be copied by hand. */
  const copy = async (from, status) => {
    try {
      await navigator.clipboard.writeText(at(from).textContent);
      at(status).textContent = "Copied.";
    } catch {
      getSelection().selectAllChildren(at(from));
      at(status).textContent = "Selected: copy it with the keyboard.";
    }
  };

  for (const name of NAMES) {
    at(`choose-${name}`).addEventListener("change", ({ target }) => {
      chosen[name] = name === "gpus" || name === "length" ? Number(target.value) : target.value;
      choose();
    });
  }
  at("choose-configuration").addEventListener("change", showConfiguration);
  at("copy-configuration").addEventListener("click", () => copy("configuration", "copied-configuration"));
  at("copy-command").addEventListener("click", () => copy("command", "copied-command"));
  at("chooser").querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  choose();
  at("without-script").hidden = true;
  at("chooser").hidden = false;
})();
