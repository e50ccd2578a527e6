// tables sort by the column whose head is pressed: numbers by their value, others as text; again for the other way
for (const head of document.querySelectorAll("table thead th")) {
  const table = head.closest("table"), body = table.tBodies[0], original = [...body.rows];
  const press = () => {
    const way = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const none = way === 1 && head.getAttribute("aria-sort") === "descending";
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    if (!none) head.setAttribute("aria-sort", way === 1 ? "ascending" : "descending");
    const value = (row) => {
      const text = row.cells[head.cellIndex].textContent.trim(), found = text.match(/^[+-]?[\d.]+(e[+-]?\d+)?/);
      const unit = { GB: 1e9, MB: 1e6, kB: 1e3 }[text.slice(-2)] ?? 1;
      return found ? parseFloat(found[0]) * unit : text;
    };
    const order = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1;
      return way * (typeof x === "number" ? x - y : x.localeCompare(y, undefined, { numeric: true }));
    };
    table.classList.toggle("sorted", !none);
    body.append(...(none ? original : [...original].sort(order)));
  };
  head.tabIndex = 0;
  head.addEventListener("click", press);
  head.addEventListener("keydown", (event) => event.key === "Enter" && press());
}
document.documentElement.classList.add("sortable");
