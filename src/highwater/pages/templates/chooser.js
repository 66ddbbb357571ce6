"use strict";
/* The chooser of a page: it looks answers up in the page's own JSON, computes none, and writes text only as text. */
(async () => {
  const unpacked = (text) => {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
  };
  const own = document.getElementById("chooser-data");
  const isPacked = own.type === "application/gzip";
  if (isPacked && !("DecompressionStream" in window)) return; /* the page says what it needs */
  const { fields, chosen: chosenFields, values, places } = isPacked ? await unpacked(own.textContent) : JSON.parse(own.textContent);
  const grouped = new Intl.NumberFormat("en");
  const at = (id) => document.getElementById(id);
  const chosen = { model: null, gpu: null, gpus: null, basis: null };
  const NAMES = Object.keys(chosen);

  const element = (name, text, attributes = {}) => {
    const made = document.createElement(name);
    if (text !== null) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };

  /* `65536`, `65,536`, `64k`, `1m`; null for anything else. */
  const tokens = (text) => {
    const found = /^\s*(\d[\d,_]*|\d*\.\d+)\s*([km]?)\s*$/i.exec(text);
    if (found === null) return null;
    const count = Number(found[1].replace(/[,_]/g, "")) * { "": 1, k: 1024, m: 1024 ** 2 }[found[2].toLowerCase()];
    return Number.isInteger(count) && count > 0 ? count : null;
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

  /* Each choice offers what the ones before it leave, first what the tables answer; what was chosen stays where it can, a length too. */
  let place = null;
  let wanted = null; /* null: the longest */

  const choose = () => {
    let left = places;
    for (const name of NAMES) {
      const offered = [...new Set(left.map((place) => place[name]))];
      if (!offered.includes(chosen[name])) chosen[name] = (left.find((place) => place.longest !== null) || left[0])[name];
      fill(at(`choose-${name}`), offered.map((value) => [value, String(value)]), chosen[name]);
      left = left.filter((place) => place[name] === chosen[name]);
    }
    at("choice-basis").hidden = new Set(places.map((place) => place.basis)).size === 1;
    [place] = left;
    answered();
  };

  /* The whole answer, of this length or the next longer one that the page has. */
  const answered = () => {
    const length = wanted || place.longest || place.answers[0].length;
    const answer = place.answers.find((each) => each.length >= length);
    if (document.activeElement !== at("choose-length")) at("choose-length").value = grouped.format(length);
    at("answer").hidden = answer === undefined;
    at("answer-beyond").hidden = answer !== undefined;
    at("answer-said").hidden = answer === undefined;
    at("beyond-command").textContent = asking(place.answers[0], length);
    if (answer !== undefined) show(answer, length);
  };

  /* The command of an answer, with another length. */
  const asking = (answer, length) => values[answer.command].replace(`--length ${answer.length}`, `--length ${length}`);

  /* As a JSON document of `recommend` has it, but for the candidates. */
  const factsOf = (answer) => {
    const facts = Object.fromEntries(fields.map((name, index) => [name, values[answer.fields[index]]]));
    const chosen = answer.chosen === null ? null : Object.fromEntries(chosenFields.map((name, index) => [name, values[answer.chosen[index]]]));
    return { ...facts, chosen };
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

  const show = (answer, length) => {
    const facts = factsOf(answer);
    at("answer-said").textContent = values[answer.said];
    at("answer-for").textContent = `${facts.chosen === null ? "Nothing that is known fits" : values[answer.label]}, ${grouped.format(answer.length)} tokens${answer.length === length ? "" : `: the next length that this page answers in full. For ${grouped.format(length)} ask again`}.`;
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
    at("command").textContent = asking(answer, length);
    at("answer-again").hidden = values[answer.command] === "";
    const shown = JSON.stringify(facts, null, 2).replace(/[^\x20-\x7e\n]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
    if (at("answer-json") !== null) at("answer-json").textContent = shown;
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
      chosen[name] = name === "gpus" ? Number(target.value) : target.value;
      choose();
    });
  }
  at("choose-length").addEventListener("input", ({ target }) => {
    const length = tokens(target.value);
    target.setAttribute("aria-invalid", String(length === null && target.value.trim() !== ""));
    if (length === null && target.value.trim() !== "") return;
    wanted = length;
    answered();
  });
  at("choose-length").addEventListener("blur", () => {
    at("choose-length").removeAttribute("aria-invalid");
    answered();
  });
  at("choose-configuration").addEventListener("change", showConfiguration);
  at("copy-configuration").addEventListener("click", () => copy("configuration", "copied-configuration"));
  at("copy-command").addEventListener("click", () => copy("command", "copied-command"));
  at("copy-beyond").addEventListener("click", () => copy("beyond-command", "copied-beyond"));
  at("choosing").addEventListener("submit", (event) => event.preventDefault());
  choose();
  at("without-script").hidden = true;
  for (const each of document.querySelectorAll("[data-scripted]")) each.hidden = false;
})();
