// Code blocks and tables that scroll can be reached and scrolled by the keyboard.
const reachable = () => {
  for (const box of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
};
document$.subscribe(() => requestAnimationFrame(reachable));
addEventListener("resize", reachable);
