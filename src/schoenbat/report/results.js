// A click on a heading sorts its table by that column, a second one the other way round; cells without a figure stay last.
"use strict";

function figureOf(row, column) {
  const text = row.cells[column].textContent.replaceAll(",", "").replaceAll("−", "-").trim();
  const figure = parseFloat(text.replace(/^[(<!]\s*/, ""));
  return Number.isNaN(figure) ? null : figure;
}

function sortBy(table, column, heading) {
  const rows = Array.from(table.tBodies[0].rows);
  const numeric = rows.some((row) => figureOf(row, column) !== null);
  // Figures begin with the largest, words with A.
  const before = heading.getAttribute("aria-sort");
  const ascending = numeric ? before === "descending" : before !== "ascending";
  const sign = ascending ? 1 : -1;
  rows.sort((one, two) => {
    if (!numeric) return sign * one.cells[column].textContent.localeCompare(two.cells[column].textContent);
    const [a, b] = [figureOf(one, column), figureOf(two, column)];
    if (a === null || b === null) return (a === null) - (b === null);
    return sign * (a - b);
  });
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  table.tBodies[0].append(...rows);
}

for (const table of document.querySelectorAll("table")) {
  Array.from(table.tHead.rows[0].cells).forEach((heading, column) => {
    const button = document.createElement("button");
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => sortBy(table, column, heading));
  });
  for (const row of table.tBodies[0].rows) {
    if (row.cells[0].querySelector("em")) row.classList.add("paper");
  }
}
