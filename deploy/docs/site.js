// What the theme leaves to be wished for by those who see little or use no mouse: a name for the
// search, tables that the keyboard scrolls, and a name of its own for each list.
function mend() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) table.tabIndex = 0;
  for (const [at, list] of document.querySelectorAll("nav nav, .md-code__nav").entries()) {
    if (list.dataset.named) continue;
    const title = document.getElementById(list.getAttribute("aria-labelledby"))?.textContent.trim();
    list.dataset.named = `${title ?? list.getAttribute("aria-label") ?? "Code"}, ${at + 1}`;
    list.removeAttribute("aria-labelledby");
    list.setAttribute("aria-label", list.dataset.named);
  }
}
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
mend();
