// The slider over loop steps, for every picture below `element` that has one: what is of a later step (data-k) is
// hidden. A picture with a play button goes through its steps when it appears.
const show = (picture, step) => {
  const slider = picture.querySelector(".lv-slider");
  slider.value = step;
  picture.querySelector(".lv-at").textContent = `${step} of ${slider.max}`;
  for (const part of picture.querySelectorAll("[data-k]")) {
    const is_row = part.tagName === "TR";
    part.classList.toggle("lv-later", !is_row && Number(part.dataset.k) > step);
    part.classList.toggle("lv-at-step", is_row && Number(part.dataset.k) === step);
  }
  for (const row of picture.querySelectorAll("[data-known]"))
    row.classList.toggle("lv-now", row.dataset.known !== "" && Number(row.dataset.known) <= step);
};
const play = (picture) => {
  clearInterval(picture.playing);
  const most = Number(picture.querySelector(".lv-slider").max);
  let step = 1;
  show(picture, step);
  picture.playing = setInterval(() => {
    if (step >= most || !picture.isConnected) return clearInterval(picture.playing);
    show(picture, ++step);
  }, 600);
};
const begin = () => {
  for (const picture of element.querySelectorAll(".lv")) {
    if (picture.begun || !picture.querySelector(".lv-slider")) continue;
    picture.begun = true;
    const moves = !matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (picture.querySelector(".lv-play") && moves) play(picture);
    else show(picture, Number(picture.querySelector(".lv-slider").value));
  }
};
element.addEventListener("input", (event) => {
  const picture = event.target.closest(".lv");
  if (!event.target.matches(".lv-slider")) return;
  clearInterval(picture.playing);
  show(picture, Number(event.target.value));
});
element.addEventListener("click", (event) => {
  if (event.target.matches(".lv-play")) play(event.target.closest(".lv"));
});
new MutationObserver(begin).observe(element, { childList: true, subtree: true });
begin();
