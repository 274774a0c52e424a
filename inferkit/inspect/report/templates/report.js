"use strict";
(() => {
  // Tables whose headings sort.
  const number = (text) => (text === "" ? NaN : Number(text));
  const compare = (left, right) => {
    if (left === right) return 0;
    if (left === "") return 1;  // what is not there comes last, whichever way
    if (right === "") return -1;
    const [a, b] = [number(left), number(right)];
    return Number.isNaN(a) || Number.isNaN(b) ? left.localeCompare(right) : a - b;
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      heading.append(button);
      button.addEventListener("click", () => {
        const isUp = heading.getAttribute("aria-sort") === "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        heading.setAttribute("aria-sort", isUp ? "descending" : "ascending");
        const value = (row) => row.cells[column].dataset.value;
        const rows = [...body.rows].sort((left, right) => {
          const [a, b] = [value(left), value(right)];
          return isUp && a !== "" && b !== "" ? compare(b, a) : compare(a, b);
        });
        body.append(...rows);
      });
    });
  }

  // The keys of the configuration: those that match, and those that are set.
  const filter = document.getElementById("filter");
  if (filter) {
    const defaults = document.getElementById("defaults");
    const count = document.getElementById("count");
    const rows = [...document.querySelectorAll(".keys tbody tr")];
    const texts = rows.map((row) => row.textContent.toLowerCase());
    document.querySelector(".tools").hidden = false;
    const show = () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, index) => {
        const isWanted = defaults.checked || words.length || !row.classList.contains("default");
        const isShown = isWanted && words.every((word) => texts[index].includes(word));
        row.classList.toggle("hidden", !isShown);
        shown += isShown ? 1 : 0;
      });
      count.textContent = `${shown} of ${rows.length} keys`;
    };
    filter.addEventListener("input", show);
    defaults.addEventListener("change", show);
    show();
  }

  // On paper nothing is folded.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const one of folded) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of folded) one.open = false;
  });
})();
