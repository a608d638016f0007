// What a place of a picture holds: a place is a column and a row, reached by mouse, touch or the arrow keys.
const data = JSON.parse(document.getElementById("data").textContent);
const sides = ["training", "generation", "there already"];

document.querySelectorAll(".picture").forEach(picture => {
  const { width, row: height, head, columns, bars } = data.pictures[picture.dataset.picture];
  const area = picture.querySelector(".columns"), drawing = area.querySelector("svg");
  const cursor = drawing.querySelector(".cursor"), place = picture.nextElementSibling;
  let column = -1, row = -1;

  function show(newColumn, newRow) {
    if (newColumn === column && newRow === row) return;
    [column, row] = [newColumn, newRow];
    cursor.setAttribute("x", column * width);
    cursor.setAttribute("y", head + row * height);
    cursor.setAttribute("visibility", "visible");
    const held = bars
      .filter(([of, first, count]) => of === column && first <= row && row < first + count)
      .map(([, , , side, text]) => `${sides[side]}: ${data.texts[text].replaceAll("\n", "\n    ")}`);
    place.textContent = [`${columns[column]} · ${data.rows[row]}`, ...(held.length ? held : ["nothing"])].join("\n");
  }

  function point(event) {
    const box = drawing.getBoundingClientRect();
    const x = Math.floor((event.clientX - box.left) / width), y = Math.floor((event.clientY - box.top - head) / height);
    if (x >= 0 && x < columns.length && y >= 0 && y < data.rows.length) show(x, y);
  }

  area.addEventListener("pointermove", point);
  area.addEventListener("pointerdown", point);
  area.addEventListener("keydown", event => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const clamp = (value, last) => Math.min(Math.max(value, 0), last);
    if (column < 0) show(0, 0);
    else show(clamp(column + step[0], columns.length - 1), clamp(row + step[1], data.rows.length - 1));
    const [left, right] = [column * width, (column + 1) * width];
    if (left < area.scrollLeft) area.scrollLeft = left;
    else if (right > area.scrollLeft + area.clientWidth) area.scrollLeft = right - area.clientWidth;
  });
});
