// Runs in a page that shows others in frames, and leaves what it measures of each as JSON in the element "found".
function fontSizes(page) {
  const texts = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT), sizes = new Set();
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (texts.currentNode.data.trim() && element.getClientRects().length) sizes.add(parseFloat(getComputedStyle(element).fontSize));
  }
  return [...sizes];
}

function boxes(elements) {
  return [...elements].map(each => each.getBoundingClientRect()).filter(box => box.width && box.height);
}

function overlapping(all) {
  const common = (one, other, low, high) => Math.min(one[high], other[high]) - Math.max(one[low], other[low]);
  return all.flatMap((one, number) => all.slice(number + 1)
    .filter(other => common(one, other, "left", "right") > 1 && common(one, other, "top", "bottom") > 1)).length;
}

function contrast(page, element) {
  const luminance = color => {
    const parts = color.match(/[\d.]+/g).slice(0, 3).map(part => part / 255)
      .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const [ground, text] = [getComputedStyle(page.body).backgroundColor, getComputedStyle(element).color].map(luminance);
  return (Math.max(ground, text) + 0.05) / (Math.min(ground, text) + 0.05);
}

function measure(frame) {
  const page = frame.contentDocument, picture = page.querySelector(".picture"), area = picture.querySelector(".columns");
  const place = picture.nextElementSibling, view = page.defaultView, drawing = area.querySelector("svg");
  const said = [];
  area.focus();
  for (const key of ["ArrowRight", "ArrowDown", "ArrowRight"]) {
    area.dispatchEvent(new view.KeyboardEvent("keydown", { key, bubbles: true }));
    said.push(place.textContent);
  }
  area.scrollLeft = 0;
  const corner = drawing.getBoundingClientRect();
  area.dispatchEvent(new view.PointerEvent("pointerdown", { clientX: corner.left + 5, clientY: corner.top + 45, bubbles: true }));
  said.push(place.textContent);
  const heading = page.querySelectorAll("h2");
  return {
    width: view.innerWidth,
    contentWidth: page.documentElement.scrollWidth,
    fontSizes: fontSizes(page),
    overlappingBlocks: overlapping(boxes(page.querySelectorAll("main > *, section > *, .bars > *"))
      .filter(box => box.height < 3000)) - nested(page),
    overlappingTexts: overlapping(boxes(area.querySelectorAll("text"))) + overlapping(boxes(picture.querySelectorAll(".labels text"))),
    picture: { top: picture.getBoundingClientRect().top + view.scrollY, width: area.clientWidth, drawn: drawing.clientWidth },
    focused: page.activeElement === area,
    said,
    contrast: Math.min(...[...page.querySelectorAll("p, h1, h2, th, .note")].map(element => contrast(page, element))),
    ground: getComputedStyle(page.body).backgroundColor,
    headings: [...heading].map(each => each.textContent),
  };
}

// Blocks within blocks do overlap: as many pairs as there are.
function nested(page) {
  const all = [...page.querySelectorAll("main > *, section > *, .bars > *")]
    .filter(each => { const box = each.getBoundingClientRect(); return box.width && box.height && box.height < 3000; });
  return all.flatMap((one, number) => all.slice(number + 1).filter(other => one.contains(other))).length;
}

addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(measure);
  document.getElementById("found").textContent = JSON.stringify(found);
});
