"use strict";
/* The answer and the picture below it, for any length: looked up in the page's own figures, none computed; text is written as text. */
const page = (() => {
  const grouped = new Intl.NumberFormat("en");
  const at = (id) => document.getElementById(id);
  const SOURCES = { p: "predicted", m: "measured", s: "simulated" };

  const element = (name, text, attributes = {}) => {
    const made = document.createElement(name);
    if (text !== null) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };

  /* `79.15 GiB`, `2.31 s`: as the command line has them. */
  const bytes = (count) => (Math.abs(count) >= 2 ** 30 ? `${(count / 2 ** 30).toFixed(2)} GiB` : `${(count / 2 ** 20).toFixed(1)} MiB`);
  const seconds = (time) => {
    if (time < 60) return `${time.toFixed(time < 10 ? 2 : 0)} s`;
    const minutes = Math.floor(Math.round(time) / 60);
    const two = (count) => String(count).padStart(2, "0");
    return minutes < 60 ? `${minutes}m ${two(Math.round(time) % 60)}s` : `${Math.floor(minutes / 60)}h ${two(minutes % 60)}m`;
  };

  /* `65536`, `65,536`, `64k`, `1m`; null for anything else. */
  const tokens = (text) => {
    const found = /^\s*(\d[\d,_]*|\d*\.\d+)\s*([km]?)\s*$/i.exec(text);
    if (found === null) return null;
    const count = Number(found[1].replace(/[,_]/g, "")) * { "": 1, k: 1024, m: 1024 ** 2 }[found[2].toLowerCase()];
    return Number.isInteger(count) && count > 0 ? count : null;
  };

  /* Figures stand column by column; one entry stands for all that are like it. */
  const pointsOf = ([lengths = [], ...columns]) => lengths.map((length, index) => {
    const [left, step, speed, letter, risk] = columns.map((column) => column[column.length === 1 ? 0 : index]);
    return { length, left: left === null ? null : left * 2 ** 20, step, speed, source: SOURCES[letter] || "", risk };
  });
  const rowOf = ([words, label, trained, reach, fails, least, source, columns, reached, asked, note]) => (
    { words, label, trained, reach, fails, least, source, reached, asked, note, points: pointsOf(columns) });

  let drawn = null;
  let wanted = null; /* null: the longest */
  let heard = () => {};

  const fits = (row, length) => length <= row.reach;

  /* What `recommend` chose for this very length comes first, then the first of the settings that reaches it. */
  const chosenRow = (length) => {
    if (wanted === null) return drawn.rows[drawn.opening[0]] || null;
    const exact = drawn.exact(length);
    if (exact === null) return null;
    if (exact !== undefined) {
      const row = drawn.rows.find(({ label }) => label === exact.label);
      return { ...(row || { points: [], trained: length, reach: length }), words: exact.words, source: exact.source, memoryOnly: exact.memoryOnly };
    }
    const row = drawn.rows.find((each) => fits(each, length));
    return row === undefined ? null : { ...row, words: `${row.words}${length > drawn.native ? drawn.past : ""}` };
  };

  const figures = (point) => {
    const found = [];
    if (point && point.left !== null) found.push([`left${drawn.device ? ` of ${bytes(drawn.device)}` : ""} a ${drawn.each}, at least`, bytes(point.left), point.risk]);
    if (point && point.speed !== null) found.push([`tokens a second, ${point.source}`, grouped.format(point.speed)]);
    if (point && point.step !== null) found.push([`a step takes, ${point.source}`, seconds(point.step)]);
    return found;
  };

  const showAnswer = (length, row) => {
    const [, longest, opening, openingWords] = drawn.opening;
    const number = wanted === null ? longest : grouped.format(length);
    at("answer-number").replaceChildren(number, ...(number === "none" ? [] : [element("span", " tokens")]));
    const said = at("answer-said");
    if (wanted === null) {
      said.replaceChildren(...(openingWords ? [`${opening}, with `, element("strong", openingWords)] : [opening]));
    } else if (row === null) {
      said.replaceChildren(`Nothing here is known to fit${drawn.farthest ? `: ${grouped.format(drawn.farthest)} is the longest.` : "."}`);
    } else {
      const memoryOnly = row.memoryOnly === undefined ? length > row.trained : row.memoryOnly;
      said.replaceChildren(`${memoryOnly ? "fits, by memory alone" : "trains"}, ${row.source}, with `, element("strong", row.words));
    }
    const point = row === null ? null : row.points.find((each) => each.length >= length) || null;
    const meter = at("answer-meter");
    meter.hidden = point === null || point.left === null || !drawn.device;
    if (!meter.hidden) meter.firstElementChild.style.width = `${(100 * (1 - point.left / drawn.device)).toFixed(1)}%`;
    at("answer-figures").replaceChildren(...figures(point).map(([name, figure, risk]) => {
      const both = element("div", null);
      const value = element("dd", figure);
      if (risk) value.append(" ", element("b", risk, { class: "risk" }));
      both.append(element("dt", name), value);
      return both;
    }));
    const failed = row === null && drawn.rows.find(({ fails, asked }) => asked && fails !== null && fails <= length);
    at("answer-at").textContent = point && point.length !== length
      ? `Memory and speed at ${grouped.format(point.length)} tokens: no shorter length leaves less.`
      : failed ? `${grouped.format(failed.fails)} tokens, ${failed.words}: ${failed.asked}.` : "";
  };

  const share = (length) => `${Math.min(100, (100 * length) / drawn.top).toFixed(2)}%`;

  const bar = (row) => {
    const track = element("p", null, { class: "track" });
    const piece = (name, length) => {
      const made = element("span", null, { class: name });
      made.style.width = share(length);
      return made;
    };
    track.append(piece("trained", row.trained));
    if (row.reach > row.trained) track.append(piece("memory-only", row.reach - row.trained));
    if (row.fails !== null) {
      const cross = element("i", null);
      cross.style.left = share(row.fails);
      track.append(cross);
    }
    return track;
  };

  const showRows = (length, chosen) => {
    const list = at("frontier");
    list.style.setProperty("--at", share(length));
    list.replaceChildren(...drawn.rows.map((row) => {
      const isChosen = chosen !== null && chosen.label === row.label;
      const item = element("li", null, { class: `reach${isChosen ? " chosen" : ""}${fits(row, length) ? "" : " short"}` });
      if (isChosen) item.setAttribute("aria-current", "true");
      const reached = element("p", null, { class: "reached" });
      reached.append(element("b", row.reached), row.note && ` ${row.note}`);
      item.append(element("p", row.words, { class: "words" }), bar(row), reached);
      const point = fits(row, length) ? row.points.find((each) => each.length >= length) : undefined;
      if (point !== undefined) {
        const left = point.left === null ? [] : [`${bytes(point.left)} left`];
        const speed = point.speed === null ? [] : [`${grouped.format(point.speed)} tokens/s ${point.source}`];
        item.append(element("p", [...left, ...speed].join(", "), { class: "left" }));
      }
      return item;
    }));
  };

  const draw = () => {
    const length = wanted === null ? drawn.longest || drawn.asked[0] : wanted;
    const row = chosenRow(length);
    showAnswer(length, row);
    showRows(length, row);
    if (document.activeElement !== at("choose-length")) at("choose-length").value = grouped.format(length);
    at("slide-length").value = Math.min(length, drawn.top);
    at("slide-length").setAttribute("aria-valuetext", `${grouped.format(length)} tokens`);
    for (const button of at("quick-lengths").children) {
      button.setAttribute("aria-pressed", String(button.value === (wanted === null ? "" : String(wanted))));
    }
    heard(length);
  };

  const ask = (length) => {
    wanted = length;
    draw();
  };

  /* Round lengths, the native one, and the longest. */
  const showButtons = () => {
    const rounds = drawn.offered.filter((length) => length < drawn.longest && length !== drawn.native).slice(-2);
    const offered = [...rounds, ...(drawn.native < drawn.longest ? [drawn.native] : [])].sort((a, b) => a - b);
    const short = (length) => (length % 1024 ? grouped.format(length) : length % 2 ** 20 ? `${length / 1024}k` : `${length / 2 ** 20}m`);
    const named = offered.map((length) => [String(length), short(length)]);
    at("quick-lengths").replaceChildren(...[...named, ["", "Longest"]].map(([value, text]) => {
      const button = element("button", text, { type: "button", value });
      button.addEventListener("click", () => ask(value === "" ? null : Number(value)));
      return button;
    }));
  };

  const show = (data, exact = () => undefined) => {
    drawn = { ...data, rows: data.rows.map(rowOf), exact };
    const slider = at("slide-length");
    [slider.min, slider.max] = [Math.min(1024, data.asked[0]), data.top];
    at("frontier-ticks").replaceChildren(...data.ticks.map((tick) => {
      const mark = element("span", tick ? `${tick / 1024}k` : "0");
      mark.style.left = share(tick);
      return mark;
    }));
    showButtons();
    draw();
  };

  at("choose-length").addEventListener("input", ({ target }) => {
    const length = tokens(target.value);
    target.setAttribute("aria-invalid", String(length === null));
    if (length !== null) ask(length);
  });
  at("choose-length").addEventListener("blur", () => {
    at("choose-length").removeAttribute("aria-invalid");
    draw();
  });
  at("slide-length").addEventListener("input", ({ target }) => ask(Number(target.value)));
  at("asking").addEventListener("submit", (event) => event.preventDefault());
  at("asking").hidden = false;

  return { at, element, grouped, show, onLength: (listener) => { heard = listener; } };
})();
