"use strict";
(() => {
  const table = document.getElementById("verdicts");
  if (table) {
    const body = table.tBodies[0];
    const rows = Array.from(body.rows);
    const names = rows.map((row) => row.cells[0].textContent.toLowerCase());
    const verdicts = rows.map((row) => row.cells[1].textContent);
    const filter = document.getElementById("filter");
    const boxes = Array.from(document.querySelectorAll(".boxes input"));
    const shown = document.getElementById("shown");

    const show = () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      const wanted = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
      let count = 0;
      rows.forEach((row, i) => {
        const keep = wanted.has(verdicts[i]) && words.every((word) => names[i].includes(word));
        row.hidden = !keep;
        count += keep;
      });
      shown.textContent = count === rows.length
        ? `${count.toLocaleString("en")} shown`
        : `${count.toLocaleString("en")} of ${rows.length.toLocaleString("en")} shown`;
    };
    filter.addEventListener("input", show);
    boxes.forEach((box) => box.addEventListener("change", show));

    const key = (row, column) => {
      const cell = row.cells[column];
      if (cell.dataset.value === undefined) return cell.textContent;
      return cell.dataset.value === "" ? -Infinity : Number(cell.dataset.value);
    };
    table.tHead.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-sort]");
      if (!button) return;
      const column = Number(button.dataset.sort);
      const head = button.closest("th");
      // Numbers from the largest first, names from A.
      const first = column === 0 ? "ascending" : "descending";
      const second = column === 0 ? "descending" : "ascending";
      const order = head.getAttribute("aria-sort") === first ? second : first;
      table.tHead.querySelectorAll("[aria-sort]").forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const keyed = rows.map((row) => [key(row, column), row]);
      keyed.sort(([a], [b]) => sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a < b ? -1 : a > b ? 1 : 0));
      body.append(...keyed.map(([, row]) => row));
    });
    show(); // a browser keeps what was typed before a reload
  }

  const live = document.getElementById("live");
  if (live) {
    const key = "attn-bridge-paused"; // a reload shows another document: what the reader chose is kept beside it
    const kept = (value) => {
      try {
        if (value !== undefined) sessionStorage.setItem(key, value);
        return sessionStorage.getItem(key);
      } catch { return null; } // storage is denied to some pages that are files
    };
    let timer = 0;
    const plan = () => {
      clearTimeout(timer);
      if (live.checked) timer = setTimeout(() => location.reload(), 1000 * Number(live.dataset.seconds));
    };
    live.checked = kept() !== "yes";
    live.addEventListener("change", () => { kept(live.checked ? "no" : "yes"); plan(); });
    plan();
  }

  const copy = document.getElementById("copy");
  if (copy) {
    const command = document.getElementById("command");
    const say = (text) => { document.getElementById("copied").textContent = text; };
    const select = () => {
      const range = document.createRange();
      range.selectNodeContents(command);
      const selection = window.getSelection();
      selection.removeAllRanges();
      selection.addRange(range);
    };
    copy.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(command.textContent);
        say("copied");
      } catch { // no permission, or no clipboard at all: the old way, and if that fails too, by hand
        select();
        say(document.execCommand("copy") ? "copied" : "selected; copy it with the keyboard");
      }
    });
  }
})();
