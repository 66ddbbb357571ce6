/* The chooser of a guide's page: it looks answers up in the page's own JSON, computes none, and writes text only as text. */
(() => {
  const { fields, chosen: chosenFields, values, places } = JSON.parse(document.getElementById("chooser-data").textContent);
  const { at, element, grouped } = page;
  const chosen = { model: null, gpu: null, gpus: null, basis: null };
  const NAMES = Object.keys(chosen);

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

  const textsOf = (row) => row.map((each, index) => ([0, 1, 6, 8, 10].includes(index) ? values[each] : each));

  /* Each choice offers what the ones before it leave, first what the tables answer; what was chosen stays where it can, a length too. */
  const choose = () => {
    let left = places;
    for (const name of NAMES) {
      const offered = [...new Set(left.map((place) => place[name]))];
      if (!offered.includes(chosen[name])) chosen[name] = (left.find((place) => place.opens !== null) || left[0])[name];
      fill(at(`choose-${name}`), offered.map((value) => [value, String(value)]), chosen[name]);
      left = left.filter((place) => place[name] === chosen[name]);
    }
    at("choice-basis").hidden = new Set(places.map((place) => place.basis)).size === 1;
    const [place] = left;
    at("answer-where").textContent = `${place.model} on ${place.gpus} x ${place.gpu}`;
    page.onLength((length) => answered(place, length));
    const { rows, opening: [first, ...said] } = place.frontier;
    page.show({ ...place.frontier, rows: rows.map(textsOf), opening: [first, ...said.map((each) => values[each])] }, (length) => exactly(place, length));
  };

  /* What is chosen for this very length: undefined where the page has no answer for it, null where nothing fits. */
  const exactly = (place, length) => {
    const answer = place.answers.find((each) => each.length === length);
    if (answer === undefined) return undefined;
    const { chosen: found } = factsOf(answer);
    return found === null ? null : { label: values[answer.label], words: values[answer.words], source: found.source, memoryOnly: found.is_memory_only };
  };

  /* The whole answer, of this length or the next longer one that the page has. */
  const answered = (place, length) => {
    const answer = place.answers.find((each) => each.length >= length);
    at("answer").hidden = answer === undefined;
    at("answer-beyond").hidden = answer !== undefined;
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
      chosen[name] = name === "gpus" ? Number(target.value) : target.value;
      choose();
    });
  }
  at("choose-configuration").addEventListener("change", showConfiguration);
  at("copy-configuration").addEventListener("click", () => copy("configuration", "copied-configuration"));
  at("copy-command").addEventListener("click", () => copy("command", "copied-command"));
  at("copy-beyond").addEventListener("click", () => copy("beyond-command", "copied-beyond"));
  at("choosing").addEventListener("submit", (event) => event.preventDefault());
  choose();
  at("without-script").hidden = true;
  for (const each of document.querySelectorAll("[data-scripted]")) each.hidden = false;
})();
